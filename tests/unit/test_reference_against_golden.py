"""The NumPy reference against every golden vector of what it covers.

The reference runs in f64, so in f32 cases what is left is the recorded run's own rounding: its
stated distance to f64, with a tenth to spare. Where a case holds f64 results the reference must
reproduce those to f32 storage precision.
"""

import numpy as np

from tests.golden.manifest import check_of, parametrize_cases
from tests.golden.nth_element import unsorted_top_k
from tests.reference import dflash2, dspark, gated_delta, loop, sampling
from tests.reference.checkpoint import read_config, read_tensors
from tests.reference.hybrid_target import load_target
from tests.reference.layers import softmax
from tests.reference.mtp import MtpHead

# f64 results are stored as f32: half a unit in the last place of numbers up to 16.
STORED_F64_ATOL = 1e-6
# Spec runs and selector scores state no error; a dense target's is about 1e-5 (golden README).
UNSTATED_ATOL = 1e-5


def pytest_generate_tests(metafunc):
    parametrize_cases(metafunc)


def test_reference_reproduces_golden_case(case):
    check_of(case, CHECKS)(case, case.arrays())


def close(got, want, atol, what):
    worst = np.max(np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)), initial=0)
    assert worst <= atol, f"{what}: off by {worst:.3g}, allowed {atol:.3g}"


def stated_error(case, group):
    """The recorded run's own distance to f64."""
    return max(1.1 * case.meta.get("error_vs_f64", {}).get(group, 0), UNSTATED_ATOL)


def check_target(case, arrays):
    target = load_target(case.target_folder)
    for b, ids in enumerate(arrays["input_ids"]):
        out = target.forward(ids)
        compared = {"logits": out.logits, "last_layer_out_before_final_norm": out.hidden[-1]}
        compared |= {f"hf_hidden_states.{i}": x for i, x in enumerate(out.hidden[:-1])}
        compared[f"hf_hidden_states.{len(out.hidden) - 1}"] = out.normed
        for name, got in compared.items():
            atol = stated_error(case, "logits" if name == "logits" else "hidden")
            # The stated error is of hf_hidden_states, whose last is normed: smaller numbers.
            atol *= 2 if name.startswith("last_layer_out") else 1
            close(got, arrays[name][b], atol, name)
        if case.is_bf16:
            close(out.logits, arrays["logits_f64ref"][b], STORED_F64_ATOL, "logits_f64ref")
            want = arrays["last_layer_out_f64ref"][b]
            close(out.hidden[-1], want, STORED_F64_ATOL, "last_layer_out_f64ref")
    check_states(case, target, arrays)
    ids, prompt_len = arrays["greedy.ids"][0], int(arrays["greedy.prompt_len"][0])
    best = target.forward(ids).logits[prompt_len - 1 : -1].argmax(-1)
    sure = np.ones(best.shape, bool)
    if case.is_bf16:  # the recorded ids are bf16's own, which may take the other side of a near tie
        sure = arrays["greedy.top2_margin"][0] >= case.meta["error_vs_f64"]["logits"]
    assert sure.any()
    np.testing.assert_array_equal(best[sure], ids[prompt_len:][sure])


def check_states(case, target, arrays):
    """What each Gated-DeltaNet layer holds after n tokens: its state, and rows before the conv."""
    target.forward(arrays["input_ids"][0])
    for name in (name for name in arrays if name.startswith("gdn.")):
        _, layer, what, after = name.split(".")
        trace, n = target.traces[int(layer.removeprefix("layer"))], int(after.removeprefix("after"))
        taps = arrays[name].shape[-1]
        got = trace.states[n - 1] if what == "recurrent" else trace.pre_conv[n - taps : n].T
        close(got, arrays[name][0], stated_error(case, "hidden"), name)


def check_gdn(case, arrays):
    """The delta rule with its state after every row, and the convolution."""
    for group, errors in case.meta["error_vs_f64"].items():
        if group != "conv_step_vs_full":
            prefix = f"{group}."
            own = {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}
            check_delta_rule(group, own, errors)
    for b, rows in enumerate(arrays["conv.x"]):
        got = gated_delta.causal_conv(rows.T.astype(np.float64), arrays["conv.weight"])
        close(got.T, arrays["conv.out"][b], STORED_F64_ATOL, "conv.out")


def check_delta_rule(group, arrays, errors):
    named = [arrays[name].astype(np.float64) for name in ("q", "k", "v", "g", "beta")]
    shape = arrays["final_state_chunk"].shape
    states = arrays.get("initial_state", np.zeros(shape)).astype(np.float64)
    for b, state in enumerate(states):
        rows = [x[b] for x in named]
        normalise = bool(arrays["use_qk_l2norm"][0])
        out, after = gated_delta.delta_rule(*rows, state, normalise=normalise)
        for form in ("recurrent", "chunk"):
            atol = max(1.1 * errors[form], STORED_F64_ATOL)
            close(out, arrays[f"out_{form}"][b], atol, f"{group} out, {form}")
        want = arrays["state_after_each_token"][b]
        close(after, want, STORED_F64_ATOL, f"{group} states")


def check_target_trained(case, arrays):
    """The target speaks the language it was fitted to wherever it is sure."""
    target, next_token = load_target(case.target_folder), arrays["next_token_map"]
    rng, active = np.random.default_rng(0), next_token.shape[1]
    ids = list(rng.integers(active, size=5))
    for _ in range(60):
        ids.append(next_token[ids[-5] % 2, ids[-1]])
    best = target.forward(ids).logits[5:-1].argmax(-1)
    assert np.mean(best == ids[6:]) > 0.9


def check_forward(case, arrays):
    """Blocks at each committed length of the schedule, over all features up to it."""
    target = load_target(case.target_folder)
    drafter = dflash2.load_drafter(case.draft_folder, target)
    fed = 0
    for s, start in enumerate(int(length) for length in arrays["schedule"]):
        got = draft_step(drafter, arrays, fed, start)
        prefix = f"step{s}."
        for name in (name for name in arrays if name.startswith(prefix)):
            check_draft_array(case, name.removeprefix(prefix), got, arrays[name][0])
        fed = start


def draft_step(drafter, arrays, fed, start):
    """Everything that a golden step may hold, under its names."""
    anchor = arrays["ids"][0, start]
    fc_out, context = drafter.fuse(arrays["target_features"][0, :start].astype(np.float64))
    got = {"fc_out": fc_out[fed:], "ctx": context[fed:]}
    got["block_ids"] = drafter.block_ids(anchor, drafter.config.block_rows)
    hidden = got["final_hidden"] = drafter.forward(got["block_ids"], context, got)
    got["logits"] = drafter.logits(hidden[1:])
    got["draft_ids"] = drafter.choose(hidden[1:], anchor)
    if isinstance(drafter, dflash2.DFlash2):
        walk = drafter.walk(hidden[1:], anchor)
        got |= {"candidate_ids": walk.candidates, "unary": walk.unary, "walk_scores": walk.scores}
    return got


def check_draft_array(case, name, got, want):
    if name == "margin":
        return
    if name.endswith("_f64ref"):
        close(got[name.removesuffix("_f64ref")], want, STORED_F64_ATOL, name)
    elif name in ("block_ids", "draft_ids"):
        np.testing.assert_array_equal(got[name], want)
    elif name in ("candidate_ids", "unary", "walk_scores"):
        if not case.is_bf16:  # bf16 logits tie, so bf16 candidates come in another order
            close(got[name], want, 0 if name == "candidate_ids" else UNSTATED_ATOL, name)
    else:
        value = got[name].swapaxes(0, 1) if name.endswith("_cache") else got[name]
        group = "logits" if name == "logits" else "hidden"
        close(value, want, case.atol(group), name)


def check_modules(case, arrays):
    check_convolutions(case, arrays)
    for prefix in sorted({".".join(name.split(".")[:2]) for name in arrays if "selector" in name}):
        check_selector({n.removeprefix(f"{prefix}."): a for n, a in arrays.items() if prefix in n})


def check_convolutions(case, arrays):
    for name in (name for name in arrays if name.startswith("conv.") and name.endswith(".x")):
        prefix = name.removesuffix(".x")
        _, dtype, _, group = prefix.split(".")
        conv = {n.removeprefix(f"{prefix}."): a.astype(np.float64) for n, a in arrays.items()
                if n.startswith(f"{prefix}.")}  # fmt: skip
        base, projection = conv["base_kernel"], conv["kernel_projection"]
        group_size, bf16 = int(group[1:]), dtype == "bfloat16"
        for b, x in enumerate(conv["x"]):
            prepared, finish = dflash2.grouped_dynamic_conv(x, base, projection, group_size)
            finished = finish(conv["sublayer_out"][b])
            atol = case.atol("conv_bf16" if bf16 else "conv_prepare")
            close(prepared, conv["prepared"][b], atol, f"{prefix}.prepared")
            atol = case.atol("conv_bf16" if bf16 else "conv_finish")
            close(finished, conv["finished"][b], atol, f"{prefix}.finished")


def check_selector(arrays):
    weights = {n: arrays[n].astype(np.float64) for n in
               ("hidden_projection", "predecessor_codebook", "successor_codebook")}  # fmt: skip
    count = arrays["candidate_ids_desc"].shape[-1]
    for b, anchor in enumerate(arrays["anchor_ids"]):
        hidden, logits = arrays["hidden"][b].astype(float), arrays["logits"][b].astype(float)
        walk = dflash2.walk(hidden, logits, anchor, weights, count)
        np.testing.assert_array_equal(walk.drafts, arrays["greedy_path"][b])
        np.testing.assert_array_equal(walk.candidates, arrays["candidate_ids_desc"][b])
        close(walk.scores, arrays["greedy_walk_scores"][b], UNSTATED_ATOL, "greedy_walk_scores")
        edges = all_edge_scores(walk, hidden, anchor, weights)
        close(edges, arrays["edge_scores"][b], UNSTATED_ATOL, "edge_scores")
        for temperature in (1.0, 0.5):
            own = f"sampled_T{temperature}"
            how = {"temperature": temperature, "uniforms": arrays[f"{own}.uniforms"][b]}
            walk = dflash2.walk(hidden, logits, anchor, weights, count, **how)
            np.testing.assert_array_equal(walk.drafts, arrays[f"{own}.path"][b], err_msg=own)
            qs = [softmax(row / temperature) for row in walk.scores]
            close(qs, arrays[f"{own}.q_rows"][b], UNSTATED_ATOL, own)


def all_edge_scores(walk, hidden, anchor, weights):
    """[rows, predecessors, candidates]; the first row's predecessor is always the anchor."""
    before = [[anchor] * walk.candidates.shape[1], *walk.candidates[:-1]]
    return [
        [dflash2.edge_scores(walk.unary[j], walk.candidates[j], p, hidden[j], weights) for p in row]
        for j, row in enumerate(before)
    ]


def check_spec_generate(case, arrays):
    """Every greedy run, step by step, against drafts, argmaxes, counts and verify logits."""
    target = load_target(case.target_folder)
    drafter = dflash2.load_drafter(case.draft_folder, target)
    for run in sorted({name.split(".")[0] for name in arrays if name.startswith("run")}):
        want = {n.removeprefix(f"{run}."): a for n, a in arrays.items() if n.startswith(f"{run}.")}
        stop_ids = set(want["stop_ids"].tolist())
        request = target.forward, want["prompt"][0], int(want["max_new_tokens"][0])
        plain = loop.generate(*request, stop_ids=stop_ids)
        got = loop.generate(
            *request,
            propose=drafter.propose,
            num_drafts=drafter.config.block_rows - 1,
            tap_ids=drafter.config.target_layer_ids,
            stop_ids=stop_ids,
        )
        assert plain.output_ids == got.output_ids == want["output_ids"][0].tolist()
        check_steps(got.steps, want)
    for run in sampled_runs(arrays):
        check_sampled(target, drafter, run, f"{case.name}, sampled")


def sampled_runs(arrays):
    """The arrays of each sampled run."""
    names = sorted({n.split(".")[0] for n in arrays if n.startswith("sampled")})
    return [
        {n.removeprefix(f"{run}."): a for n, a in arrays.items() if n.startswith(f"{run}.")}
        for run in names
    ]


def check_sampled(target, drafter, run, what):
    """A run whose random calls are `uniforms`, one after another."""
    settings = run.get("temperature_top_p_top_k", run.get("temperature")).tolist()
    temperature, top_p, top_k = (settings + [1.0, 0.0])[:3]
    prompt, want = run["prompt"][0], run["output_ids"][0]
    is_spark = isinstance(drafter, dspark.DSpark)  # whose recorded loop drafts full blocks always
    most = drafter.config.block_rows - (0 if is_spark else 1)

    def process(logits):
        return sampling.distribution(logits, temperature, top_p=top_p, top_k=int(top_k) or None)

    def propose(*step):
        if isinstance(drafter, dflash2.DFlash2):
            return drafter.sample(*step, temperature, find=unsorted_candidates)
        return drafter.sample(*step, temperature if is_spark else process)

    got, produced = sampling.generate(
        target.forward,
        prompt,
        len(want) - len(prompt),
        propose=propose,
        num_drafts=lambda remaining: most if is_spark else min(most, remaining),
        tap_ids=drafter.config.target_layer_ids,
        uniforms=run["uniforms"].astype(np.float64),
        process=process,
    )
    assert got == want.tolist(), what
    counts = run["acceptance_lengths" if is_spark else "produced"].tolist()
    assert produced[:-1] == counts[:-1] and produced[-1] >= counts[-1], what


def unsorted_candidates(logits, count):
    ids = np.array(unsorted_top_k(logits, count))
    return ids, logits[ids]


def check_rejection(case, arrays):
    """Every row of every group, sparse ones in both forms of q."""
    for group in sorted({name.split(".")[0] for name in arrays}):
        own = {n.removeprefix(f"{group}."): a for n, a in arrays.items() if n.startswith(group)}
        for row in range(len(own["p_f64"])):
            p, drafts, uniforms = (own[n][row] for n in ("p_f64", "draft_tokens", "u_f64"))
            forms = [list(own["q_f64"][row])]
            if "candidate_ids" in own:
                pairs = zip(own["candidate_ids"][row], own["q_rows_f64"][row], strict=True)
                forms.append(list(pairs))
            if np.all(own["q_f64"][row].max(axis=1) == 1):
                forms.append([None] * len(drafts))
            for qs in forms:
                accepted, rest = sampling.accept(p, qs, drafts, uniforms)
                assert accepted == own["accepted"][row], f"{group} {row}"
                close(rest, own["next_dist_f64"][row], 1e-12, f"{group} {row}")
                token = sampling.draw(rest, own["u_next_f64"][row])
                assert token == own["next_token"][row], f"{group} {row}"


def check_steps(steps, want):
    assert [step.start for step in steps] == want["start"].tolist()
    assert [step.produced for step in steps] == want["produced"].tolist()
    for s, step in enumerate(steps):
        rows = len(step.verify_block_ids)
        surplus = [-1] * (want["verify_block_ids"].shape[1] - rows)
        assert step.verify_block_ids + surplus == want["verify_block_ids"][s].tolist()
        assert step.target_argmax + surplus == want["target_argmax"][s].tolist()
        logits = want["verify_logits_every8th"][s, :rows]
        close(step.verify_logits[:, ::8], logits, UNSTATED_ATOL, f"verify logits of step {s}")


def check_dspark_forward(case, arrays):
    """Blocks at each committed length; every row of one is a draft."""
    target = load_target(case.target_folder)
    drafter = dspark.DSpark.load(case.draft_folder, target.embedding, target.head)
    fed = 0
    for s, start in enumerate(int(length) for length in arrays["schedule"]):
        got = dspark_step(drafter, arrays, fed, start)
        prefix = f"step{s}."
        for name in (name for name in arrays if name.startswith(prefix)):
            check_dspark_array(case, name.removeprefix(prefix), got, arrays[name][0])
        fed = start


def dspark_step(drafter, arrays, fed, start):
    """Everything that a golden step of DSpark may hold, under its names."""
    anchor = arrays["ids"][0, start]
    fc_out, context = drafter.fuse(arrays["target_features"][0, :start].astype(np.float64))
    got = {"fc_out": fc_out[fed:], "ctx": context[fed:]}
    got["block_ids"] = drafter.block_ids(anchor, drafter.config.block_rows)
    hidden = got["final_hidden"] = drafter.forward(got["block_ids"], context, got)
    decided = drafter.chain(hidden, anchor)
    return got | {
        "base_logits": drafter.logits(hidden),
        "markov_bias": decided.bias,
        "corrected_logits": decided.logits,
        "draft_ids": decided.drafts,
        "confidence_logits": drafter.confidence_logits(hidden, decided.latents),
    }


def check_dspark_array(case, name, got, want):
    scores = ("base_logits", "markov_bias", "corrected_logits", "confidence_logits")
    if name.removesuffix("_f64ref") not in scores:
        check_draft_array(case, name, got, want)
    elif name.endswith("_f64ref"):
        close(got[name.removesuffix("_f64ref")], want, STORED_F64_ATOL, name)
    else:
        close(got[name], want, case.atol("logits"), name)


def check_dspark_modules(case, arrays):
    """Each Markov head: forced predecessors, one step alone, and the greedy chain."""
    for kind in ("vanilla", "gated", "rnn"):
        own = {n.removeprefix(f"{kind}."): a for n, a in arrays.items() if n.startswith(f"{kind}.")}
        prefix = "param."
        head = {n.removeprefix(prefix): a.astype(float) for n, a in own.items() if prefix in n}
        atol = max(case.atol(kind), UNSTATED_ATOL)
        for b, anchor in enumerate(own["first_prev_token"]):
            base, hidden = own["base_logits"][b].astype(float), own["hidden"][b].astype(float)
            greedy = dspark.chain(base, hidden, anchor, head)
            np.testing.assert_array_equal(greedy.drafts, own["greedy_tokens"][b], err_msg=kind)
            close(greedy.logits, own["greedy_corrected_logits"][b], atol, kind)
            forced = dspark.chain(base, hidden, -1, head, forced=own["teacher_prev_tokens"][b])
            close(forced.logits, own["teacher_forced_logits"][b], atol, kind)
            close(forced.bias[0], own["stateless_step_bias_row0"][b], atol, kind)


def check_dspark_spec_generate(case, arrays):
    """A run cut by confidence and one cut by a stop, which the library's tests add the others to.

    The last blocks of a budget are full in the recorded loop and cut in ours.
    """
    target = load_target(case.target_folder)
    drafter = dspark.DSpark.load(case.draft_folder, target.embedding, target.head)
    rows = drafter.config.block_rows
    for run in ("run1", "run3"):
        want = {n.removeprefix(f"{run}."): a for n, a in arrays.items() if n.startswith(f"{run}.")}
        threshold = float(want["confidence_threshold"][0])
        got = loop.generate(
            target.forward,
            want["prompt"][0],
            int(want["max_new_tokens"][0]),
            propose=lambda *args, threshold=threshold: drafter.propose(*args, threshold),
            num_drafts=rows,
            tap_ids=drafter.config.target_layer_ids,
            stop_ids=set(want["stop_ids"].tolist()),
        )
        assert got.output_ids == want["output_ids"][0].tolist()
        end = want["prompt"].size + int(want["max_new_tokens"][0])
        full = int(np.sum(want["start"] + rows + 1 <= end))
        assert full > 0
        check_steps(got.steps[:full], {n: a[:full] for n, a in want.items()})
    for run in sampled_runs(arrays):
        check_sampled(target, drafter, run, f"{case.name}, sampled")


def check_mtp(case, arrays):
    """Teacher-forced steps, each over the rows of the one before, and a greedy chain."""
    config, tensors = read_config(case.target_folder), read_tensors(case.target_folder)
    embedding = next(x for n, x in tensors.items() if n.endswith("embed_tokens.weight"))
    head = MtpHead(config, tensors, embedding, tensors.get("lm_head.weight", embedding))
    ids, hidden = arrays["input_ids"][0], arrays["target_hidden_post_final_norm"][0].astype(float)
    steps = case.meta["K"]
    rows = len(ids) - steps - 1
    out = hidden[:rows]
    for k in range(steps):
        out = head.forward(out, ids[k + 1 : k + 1 + rows])
        close(out, arrays[f"step{k}.hidden"][0], stated_error(case, "hidden"), f"step {k}")
        logits = arrays[f"step{k}.logits"][0]
        close(head.logits(out), logits, stated_error(case, "logits"), f"step {k} logits")
    chain = [*ids, arrays["chain.anchor"][0, 0]]
    drafts, outs, logits = head.draft(hidden, chain, arrays["chain.draft_ids"].shape[1])
    np.testing.assert_array_equal(drafts, arrays["chain.draft_ids"][0])
    close(outs, arrays["chain.hidden"][0], stated_error(case, "hidden"), "chain")
    close(logits, arrays["chain.logits"][0], stated_error(case, "logits"), "chain logits")


CHECKS = {
    "target": check_target,
    "target_trained": check_target_trained,
    "gdn": check_gdn,
    "rejection": check_rejection,
    "dflash_forward": check_forward,
    "dflash2_forward": check_forward,
    "dflash2_modules": check_modules,
    "dflash_spec_generate": check_spec_generate,
    "dflash2_spec_generate": check_spec_generate,
    "dspark_forward": check_dspark_forward,
    "dspark_modules": check_dspark_modules,
    "dspark_spec_generate": check_dspark_spec_generate,
    "mtp": check_mtp,
}
