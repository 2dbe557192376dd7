"""The tile loop of `skinny_matmul` as a Triton kernel, called through jax-triton.

Imported only when impl="triton" is asked for: triton and jax-triton are an extra. 0.3.1 goes with
triton 3.6, 0.4 with triton 3.7.
"""

# pyright: reportMissingImports=false
# pyright: reportMissingModuleSource=false

import inspect

import jax
import jax_triton
import triton
import triton.language as tl

from pallas_kernels._skinny_tiles import SkinnyMatmulConfig, stages_that_fit


@triton.jit
def _product(
    x_ptr,  # [N, in], N a multiple of block_r
    w_ptr,  # [out, in]
    y_ptr,  # [split_k, N, columns]
    inner: tl.constexpr,
    out: tl.constexpr,
    num_rows: tl.constexpr,
    columns: tl.constexpr,  # out rounded up to block_n
    steps: tl.constexpr,  # tiles of `in` that a program adds
    is_ragged: tl.constexpr,  # whether they reach past `in`
    is_f32: tl.constexpr,
    block_r: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
):
    part = tl.program_id(2)
    rows = tl.program_id(0) * block_r + tl.arange(0, block_r)
    cols = tl.program_id(1) * block_n + tl.arange(0, block_n)
    acc = tl.zeros((block_r, block_n), tl.float32)
    for i in range(0, steps):
        k = (part * steps + i) * block_k + tl.arange(0, block_k)
        x_at = x_ptr + rows[:, None] * inner + k[None, :]
        w_at = w_ptr + cols[:, None] * inner + k[None, :]
        if is_ragged:
            x = tl.load(x_at, mask=k[None, :] < inner, other=0)
            w = tl.load(w_at, mask=(cols[:, None] < out) & (k[None, :] < inner), other=0)
        else:
            x = tl.load(x_at)
            w = tl.load(w_at, mask=cols[:, None] < out, other=0)
        if is_f32:
            acc += tl.dot(x, tl.trans(w), input_precision="ieee")
        else:
            acc += tl.dot(x, tl.trans(w))
    y_at = y_ptr + (part * num_rows + rows[:, None]) * columns + cols[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty))


def product(x, w, *, out_dtype, block_r: int, config: SkinnyMatmulConfig) -> jax.Array:
    """Return the parts of x @ w.T, [split_k, N, out rounded up to block_n] in `out_dtype`."""
    rows, inner = x.shape
    out = w.shape[0]
    blocks = -(-out // config.block_n)
    columns = blocks * config.block_n
    shape = jax.ShapeDtypeStruct((config.split_k, rows, columns), out_dtype)
    # 0.4 renamed the keyword that says what comes out.
    names = inspect.signature(jax_triton.triton_call).parameters
    result = {"out_type" if "out_type" in names else "out_shape": shape}
    return jax_triton.triton_call(
        x,
        w,
        kernel=_product,
        grid=(rows // block_r, blocks, config.split_k),
        num_warps=config.num_warps,
        num_stages=stages_that_fit(config, block_r + config.block_n, x.dtype.itemsize),
        name="skinny_matmul_triton",
        inner=inner,
        out=out,
        num_rows=rows,
        columns=columns,
        steps=-(-inner // (config.block_k * config.split_k)),
        is_ragged=bool(inner % (config.block_k * config.split_k)),
        is_f32=x.dtype.itemsize == 4,
        block_r=block_r,
        block_n=config.block_n,
        block_k=config.block_k,
        **result,
    )
