// The gradient of a copy is a sum: over the token's slots, in slot order, unweighted (contract 7).
// Y is the type of the rows, S that of the result, C the type of the sum.

KERNEL copy_backward(
    const Y *rows, const i64 *positions, S *result, i64 tokens, i64 slots, i64 hidden) {
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        const i64 *position = positions + token * slots;
        for (i64 column = threadIdx.x; column < hidden; column += blockDim.x) {
            C total = (C)widen(rows[position[0] * hidden + column]);
            for (i64 slot = 1; slot < slots; ++slot)
                total = total + (C)widen(rows[position[slot] * hidden + column]);
            narrow(total, result[token * hidden + column]);
        }
    }
}
