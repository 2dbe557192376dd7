"""The library against golden vectors, driven by the manifest alone (pytest --golden-dir DIR).

Tolerances are the manifest's `suggested_atol`. bf16 runs of the reference are themselves far from
f64, so bf16 is judged by its distance to the stored f64 results: at most twice the reference's own
distance, in the maximum and in the mean. Ids must be equal; in bf16, where the reference's margin
is not below its own error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.golden import adapter
from tests.golden.manifest import check_of, parametrize_cases

# A spec run states no tolerance: ten times the typical f32 error of a dense target's logits.
SPEC_LOGITS_ATOL = 1e-4
# A probability moves by at most a quarter of what its logits do, here divided by 0.9.
SPEC_PROBS_ATOL = 3e-5
# Arrays that the manifest's "logits" tolerance covers; the others are "hidden".
SCORES = ("logits", "unary", "walk_scores", "markov_bias")
# The golden README's floor for single functions.
MODULE_ATOL = 1e-6
# Nor do selector scores: ten times the 8e-7 by which the recorded f32 scores miss f64.
SELECTOR_ATOL = 1e-5


def pytest_generate_tests(metafunc):
    parametrize_cases(metafunc)


@pytest.fixture
def full_precision():
    """f32 products as f32, wherever the library leaves the choice to the backend."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.usefixtures("full_precision")
def test_library_reproduces_golden_case(case):
    check_of(case, CHECKS)(case, case.arrays())


def check_target(case, arrays):
    """Every recorded text in one call; the surplus of shorter ones comes after what is read."""
    params = adapter.plain_pair(case.target_folder)
    ids, greedy = arrays["input_ids"], arrays["greedy.ids"]
    texts = np.zeros((len(ids) + 1, max(ids.shape[1], greedy.shape[1])), np.int32)
    texts[:-1, : ids.shape[1]] = ids
    texts[-1:, : greedy.shape[1]] = greedy
    logits, hidden, normed = adapter.target_outputs(params, texts)
    got = {"logits": logits, "last_layer_out_before_final_norm": hidden[-1]}
    got |= {f"hf_hidden_states.{i}": x for i, x in enumerate(hidden[:-1])}
    got[f"hf_hidden_states.{len(hidden) - 1}"] = normed
    f64 = {"last_layer_out_before_final_norm": "last_layer_out_f64ref"}
    for name, x in got.items():
        x = x[: len(ids), : ids.shape[1]]
        close(case, name, x, arrays[name], arrays.get(f64.get(name, f"{name}_f64ref")))
    check_greedy(case, params, arrays, logits[-1])
    if any(name.startswith("gdn.") for name in arrays):
        check_row_states(case, params, arrays)


def check_row_states(case, params, arrays):
    """What each layer holds after any number of a step's rows is what those tokens leave."""
    start = int(arrays["stepwise.prefill_len"][0])
    after = sorted({int(n.rsplit("after", 1)[1]) for n in arrays if n.startswith("gdn.")})
    ids, counts = arrays["input_ids"][0], [n - start for n in after]
    logits, states = adapter.kept_states(params, ids, start, counts)
    want = arrays["stepwise.logits"][0, start : start + len(logits)]
    close(case, "stepwise.logits", logits, want)
    for name in (n for n in arrays if n.startswith("gdn.")):
        _, layer, what, end = name.split(".")
        state, in_front = states[int(layer.removeprefix("layer"))]
        b = after.index(int(end.removeprefix("after")))
        if what == "recurrent":
            within(name, state[b], arrays[name][0], case.atol("hidden"))
        else:  # the recorded window holds one row more
            want = arrays[name][0, :, -in_front.shape[1] :].T
            within(name, in_front[b], want, case.atol("hidden"))


def check_gdn(case, arrays):
    """The op with the state after every row, the chunked form, and the convolution."""
    for group, errors in case.meta["error_vs_f64"].items():
        prefix = f"{group}."
        own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
        for b in range(len(own.get("q", ()))):
            check_delta_rule(group, own, b, errors)
    for rows, want in zip(arrays["conv.x"], arrays["conv.out"], strict=True):
        within("conv.out", adapter.convolved(rows.T, arrays["conv.weight"]).T, want, MODULE_ATOL)


def check_delta_rule(group, arrays, b, errors):
    rows = [arrays[name][b] for name in ("q", "k", "v", "g", "beta")]
    state = np.zeros(arrays["final_state_chunk"].shape[1:], np.float32)
    state = arrays["initial_state"][b] if "initial_state" in arrays else state
    normalise = bool(arrays["use_qk_l2norm"][0])
    atol = max(10 * errors["recurrent"], MODULE_ATOL)
    state_atol = max(10 * errors["state_recurrent"], MODULE_ATOL)
    if normalise:  # the op always brings keys to length one, as every model does
        out, after = adapter.delta_rule_rows(*rows, state)
        within(f"{group} rows", out, arrays["out_recurrent"][b], atol)
        within(f"{group} states", after, arrays["state_after_each_token"][b], state_atol)
    out, last = adapter.delta_rule_chunks(*rows, state, normalise)
    within(f"{group} chunks", out, arrays["out_chunk"][b], max(10 * errors["chunk"], MODULE_ATOL))
    state_atol = max(10 * errors["state_chunk"], MODULE_ATOL)
    within(f"{group} last state", last, arrays["final_state_chunk"][b], state_atol)


def check_greedy(case, params, arrays, forced_logits):
    """64 tokens: as the best after each recorded prefix, and in f32 decoded one by one."""
    ids, prompt_len = arrays["greedy.ids"][0], int(arrays["greedy.prompt_len"][0])
    best = forced_logits[prompt_len - 1 : len(ids) - 1].argmax(axis=-1)
    same_ids(case, "greedy.ids", best, ids[prompt_len:], arrays["greedy.top2_margin"][0])
    if not case.is_bf16:  # there a near tie that falls the other way changes the rest of the text
        budget = len(ids) - prompt_len
        got, _, _ = adapter.spec_generate(params, ids[:prompt_len], budget, capacity=len(ids))
        np.testing.assert_array_equal(got, ids)


def check_target_trained(case, arrays):
    """The fitted language: next token by the current one and the parity four tokens before it."""
    params, next_token = adapter.plain_pair(case.target_folder), arrays["next_token_map"]
    ids = list(np.random.default_rng(0).integers(next_token.shape[1], size=5))
    for _ in range(60):
        ids.append(next_token[ids[-5] % 2, ids[-1]])
    logits, _, _ = adapter.target_outputs(params, np.array([ids]))
    best = logits[0, 5:-1].argmax(axis=-1)
    assert np.mean(best == ids[6:]) > 0.9


def check_forward(case, arrays):
    dtype = jnp.bfloat16 if case.is_bf16 else None
    params = adapter.load_pair(case.target_folder, case.draft_folder, dtype)
    inputs = arrays["ids"][0], arrays["target_features"][0], arrays["schedule"]
    for s, got in enumerate(adapter.draft_steps(params, *inputs)):
        prefix = f"step{s}."
        want = {n.removeprefix(prefix): a[0] for n, a in arrays.items() if n.startswith(prefix)}
        check_draft_step(case, prefix, got, want)


def check_draft_step(case, prefix, got, want):
    for name, x in want.items():
        if name == "margin" or name.endswith("_f64ref"):
            continue
        elif name == "block_ids":
            np.testing.assert_array_equal(got[name], x)
        elif name == "draft_ids":
            same_ids(case, f"{prefix}{name}", got[name], x, want["margin"])
        elif name == "candidate_ids":
            if not case.is_bf16:  # bf16 logits tie, and then candidates swap places
                np.testing.assert_array_equal(got[name], x)
        elif name in ("unary", "walk_scores") and case.is_bf16:
            check_bf16_candidates(case, f"{prefix}{name}", name, got, want)
        else:
            close(case, f"{prefix}{name}", got[name], x, want.get(f"{name}_f64ref"))


def check_bf16_candidates(case, label, name, got, want):
    """Scores of the candidates that both chose, which in bf16 may be all but the last ones."""
    # Recorded walk scores are sums that were rounded once more, to a bf16 unit in the last place.
    atol = case.atol("logits") + 2**16 * float(np.spacing(np.abs(want[name]).max()))
    for j, ids in enumerate(want["candidate_ids"]):
        ours = dict(zip(got["candidate_ids"][j], got[name][j], strict=True))
        theirs = dict(zip(ids, want[name][j], strict=True))
        both = sorted(ours.keys() & theirs.keys())
        assert len(both) >= len(ids) - 2
        within(label, [ours[c] for c in both], np.array([theirs[c] for c in both]), atol)


def check_modules(case, arrays):
    for name in sorted(n for n in arrays if n.startswith("conv.") and n.endswith(".x")):
        check_convolution(case, name.removesuffix(".x"), arrays)
    for prefix in sorted({".".join(n.split(".")[:2]) for n in arrays if n.startswith("selector.")}):
        check_selector(prefix, {n.removeprefix(f"{prefix}."): a for n, a in arrays.items()})


def check_convolution(case, prefix, arrays):
    _, dtype, _, group = prefix.split(".")
    names = ("x", "base_kernel", "kernel_projection", "sublayer_out")
    inputs = (arrays[f"{prefix}.{name}"] for name in names)
    got = adapter.convolve(*inputs, group_size=int(group[1:]), dtype=dtype)
    sides = ("conv_bf16",) * 3 if dtype == "bfloat16" else ("conv_prepare",) * 2 + ("conv_finish",)
    for name, x, side in zip(("prepared", "dynamic_finish", "finished"), got, sides, strict=True):
        within(f"{prefix}.{name}", x, arrays[f"{prefix}.{name}"], case.atol(side))


def check_selector(prefix, arrays):
    for name, x in adapter.select(arrays).items():
        if x.dtype.kind == "i":
            np.testing.assert_array_equal(x, arrays[name], err_msg=f"{prefix}.{name}")
        else:
            within(f"{prefix}.{name}", x, arrays[name], SELECTOR_ATOL)
    sampled = [n for n in arrays if n.startswith("sampled_T") and n.endswith(".path")]
    for name in sorted(n.removesuffix(".path") for n in sampled):
        noise = float(name.removeprefix("sampled_T")), arrays[f"{name}.uniforms"]
        path, q = adapter.sampled_select(arrays, *noise)
        np.testing.assert_array_equal(path, arrays[f"{name}.path"], err_msg=f"{prefix}.{name}")
        within(f"{prefix}.{name} q", q, arrays[f"{name}.q_rows"], SELECTOR_ATOL)


def check_spec_generate(case, arrays):
    """Every greedy run step by step, then the sampled ones."""
    params = adapter.load_pair(case.target_folder, case.draft_folder)
    runs = sorted({n.split(".")[0] for n in arrays if n.startswith("run")})
    capacity = max(arrays[f"{run}.output_ids"].size for run in runs)
    for run in runs:
        want = {n.removeprefix(f"{run}."): a for n, a in arrays.items() if n.startswith(f"{run}.")}
        request = want["prompt"][0], int(want["max_new_tokens"][0]), want["stop_ids"].tolist()
        got, status, steps = adapter.spec_generate(params, *request, capacity=capacity)
        np.testing.assert_array_equal(got, want["output_ids"][0], err_msg=run)
        assert status.name == ("STOP" if got[-1] in want["stop_ids"] else "LENGTH")
        plain, _, _ = adapter.spec_generate(params, *request, capacity=capacity, keep=0)
        np.testing.assert_array_equal(plain, got, err_msg=f"{run}, plain")
        check_steps(run, steps, want)
    check_sampled(params, arrays)


def check_mtp(case, arrays):
    """Every row of the first step as the first draft of a text that ends there, and a chain.

    Later teacher-forced steps have a layout of training's own; the reference reproduces them.
    """
    params = adapter.load_pair(case.target_folder, case.target_folder)
    ids, hidden = arrays["input_ids"][0], arrays["target_hidden_post_final_norm"][0]
    text = np.append(ids, arrays["chain.anchor"][0, 0])
    want = arrays["step0.hidden"][0]
    lengths = 1 + np.arange(len(want))
    _, out, logits = adapter.head_drafts(params, hidden, text, lengths, 1)
    close(case, "step0.hidden", out[:, 0], want)
    close(case, "step0.logits", logits[:, 0], arrays["step0.logits"][0])
    count = arrays["chain.draft_ids"].shape[1]
    drafts, out, logits = adapter.head_drafts(params, hidden, text, [len(ids)], count)
    np.testing.assert_array_equal(drafts[0], arrays["chain.draft_ids"][0])
    close(case, "chain.hidden", out[0], arrays["chain.hidden"][0])
    close(case, "chain.logits", logits[0], arrays["chain.logits"][0])


def check_markov_heads(case, arrays):
    """Each Markov head alone: with the predecessors given, and greedily."""
    for kind in ("vanilla", "gated", "rnn"):
        own = {n.removeprefix(f"{kind}."): a for n, a in arrays.items() if n.startswith(f"{kind}.")}
        bias, tokens = adapter.markov_chain(kind, own)
        np.testing.assert_array_equal(tokens, own["greedy_tokens"], err_msg=kind)
        atol = case.atol(kind)
        within(kind, bias + own["base_logits"], own["greedy_corrected_logits"], atol)
        forced = adapter.markov_biases(kind, own)
        within(kind, forced + own["base_logits"], own["teacher_forced_logits"], atol)
        within(kind, forced[:, 0], own["stateless_step_bias_row0"], atol)


def check_spark_generate(case, arrays):
    """Every greedy run, cut by confidence, then the sampled one.

    The recorded loop verifies full blocks to the end and then trims; steps near it are left out.
    """
    params = adapter.load_pair(case.target_folder, case.draft_folder)
    runs = sorted({n.split(".")[0] for n in arrays if n.startswith("run")})
    capacity = max(arrays[f"{run}.output_ids"].size for run in runs) + 8
    for run in runs:
        want = {n.removeprefix(f"{run}."): a for n, a in arrays.items() if n.startswith(f"{run}.")}
        request = want["prompt"][0], int(want["max_new_tokens"][0]), want["stop_ids"].tolist()
        confident = adapter.with_threshold(params, float(want["confidence_threshold"][0]))
        got, status, steps = adapter.spec_generate(confident, *request, capacity=capacity)
        np.testing.assert_array_equal(got, want["output_ids"][0], err_msg=run)
        assert status.name == ("STOP" if got[-1] in want["stop_ids"] else "LENGTH")
        end = want["prompt"].size + request[1]
        full = int(np.sum(want["start"] + params.draft.config.max_drafts + 1 < end))
        assert full > 1 or run == "run3"
        check_steps(run, steps[:full], {n: a[:full] for n, a in want.items()})
    check_sampled(params, arrays)


def check_sampled(params, arrays):
    """Runs at a temperature, by recorded uniforms; three verifications of each in full."""
    for name in sorted({n.split(".")[0] for n in arrays if n.startswith("sampled")}):
        run = {n.removeprefix(f"{name}."): a for n, a in arrays.items() if n.startswith(name + ".")}
        settings = run.get("temperature_top_p_top_k", run.get("temperature")).tolist()
        filters = dict(zip(("temperature", "top_p", "top_k"), [*settings, 1.0, 0.0], strict=False))
        tokens, counts, steps = adapter.sampled_generate(params, run, **filters)
        np.testing.assert_array_equal(tokens, run["output_ids"][0], err_msg=name)
        want = run["produced" if "produced" in run else "acceptance_lengths"].tolist()
        assert counts[:-1] == want[:-1] and counts[-1] >= want[-1]
        for i, (p, out) in enumerate(steps[:3]):
            own = {n.split(".", 1)[1]: a for n, a in run.items() if n.startswith(f"reject{i}.")}
            check_verification(f"{name} {i}", p, out, own)


def check_verification(what, p, out, want):
    """Distributions, drafts and verdict of one step."""
    within(f"{what} p", p, want["target_probs"], SPEC_PROBS_ATOL)
    q, drafts = out.proposal.q, want.get("draft_tokens", want.get("verify_input_ids"))[:, -7:]
    if "draft_indices" in want:
        count = want["draft_indices"].shape[2]
        np.testing.assert_array_equal(q.ids[:, :, :count], want["draft_indices"], err_msg=what)
        assert not q.probs[:, :, count:].any()
        q = q.probs[:, :, :count]
    within(f"{what} q", q, want["draft_probs"], SPEC_PROBS_ATOL)
    np.testing.assert_array_equal(out.proposal.tokens, drafts, err_msg=what)
    assert out.verification.num_accepted == want["accepted"], what
    token = out.verification.committed[0, int(out.verification.num_accepted[0])]
    assert token == want.get("next", want.get("next_token")), what


# Where u * q(d) is p(d) but for what f32 rounds away; f64 accepts.
BELOW_F32 = ("p_equals_q_all_accept", "u_just_below_threshold_accepts")


def check_rejection(case, arrays):
    """Accept tests and what replaces a rejected draft, with q over the vocabulary and sparse."""
    for group in sorted({n.split(".")[0] for n in arrays}):
        own = {n.removeprefix(f"{group}."): a for n, a in arrays.items() if n.startswith(group)}
        forms = [own["q_f64"]]
        if "candidate_ids" in own:
            forms.append((own["candidate_ids"], own["q_rows_f64"]))
        names = case.meta["edge_row_names"] if group == "edge" else [group] * len(own["p_f64"])
        sure = np.array([name not in BELOW_F32 for name in names])
        for q in forms:
            uniforms = own["u_f64"], own["u_next_f64"]
            count, token = adapter.accept(own["p_f64"], q, own["draft_tokens"], *uniforms)
            np.testing.assert_array_equal(count[sure], own["accepted"][sure], err_msg=group)
            np.testing.assert_array_equal(token[sure], own["next_token"][sure], err_msg=group)


def check_steps(run, steps, want):
    assert [step.start for step in steps] == want["start"].tolist()
    assert [step.produced for step in steps] == want["produced"].tolist()
    for s, step in enumerate(steps):
        rows = len(step.verify_block_ids)
        for name in ("verify_block_ids", "target_argmax"):
            x = np.full_like(want[name][s], -1)
            x[:rows] = getattr(step, name)
            np.testing.assert_array_equal(x, want[name][s], err_msg=f"{run} step {s} {name}")
        logits = want["verify_logits_every8th"][s, :rows]
        within(f"{run} step {s}", step.verify_logits[:, ::8], logits, SPEC_LOGITS_ATOL)


def within(name, got, want, atol):
    worst = np.max(np.abs(np.asarray(got, np.float64) - want), initial=0)
    assert worst <= atol, f"{name}: off by {worst:.3g}, allowed {atol:.3g}"


def close(case, name, got, want, f64ref=None):
    """The manifest's tolerance, or the bf16 rule where the f64 result is stored."""
    assert got.shape == want.shape, f"{name}: shape {got.shape}, wanted {want.shape}"
    if f64ref is None:
        group = "logits" if name.endswith(SCORES) else "hidden"
        within(name, got, want, case.atol(group))
        return
    theirs, ours = np.abs(want - f64ref), np.abs(got - f64ref)
    for measure in (np.max, np.mean):
        allowed = 2 * measure(theirs)
        assert measure(ours) <= allowed, (
            f"{name}: {measure.__name__} distance to f64 {measure(ours):.3g}, allowed {allowed:.3g}"
        )


def same_ids(case, name, got, want, margin):
    """Equal ids; in bf16 only where the recorded margin is at least the recorded error."""
    sure = np.ones(want.shape, bool)
    if case.is_bf16:
        sure = margin >= case.meta["error_vs_f64"]["logits"]
    assert sure.any()
    np.testing.assert_array_equal(got[sure], want[sure], err_msg=name)


CHECKS = {
    "target": check_target,
    "target_trained": check_target_trained,
    "gdn": check_gdn,
    "dflash_forward": check_forward,
    "dflash2_forward": check_forward,
    "dflash2_modules": check_modules,
    "dflash_spec_generate": check_spec_generate,
    "dflash2_spec_generate": check_spec_generate,
    "rejection": check_rejection,
    "mtp": check_mtp,
    "dspark_forward": check_forward,
    "dspark_modules": check_markov_heads,
    "dspark_spec_generate": check_spark_generate,
}
