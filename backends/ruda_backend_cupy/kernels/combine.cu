// Rows back to tokens, by gathering: nobody writes where another does, and the order of every sum is
// fixed (contract 6). Y is the type of the rows, W that of the weights, S that of the output, C the
// type of the sum.

// Slots of a token in ascending expert id, equal ids in slot order: a slot's place is the number of
// slots that come before it.
KERNEL order_slots(
    const i64 *expert_ids, const i64 *positions, const W *weights, i64 *ordered_positions,
    C *ordered_weights, i64 tokens, i64 slots) {
    for (i64 i = first_index(); i < tokens * slots; i += index_stride()) {
        i64 start = i / slots * slots;
        i64 place = start;
        for (i64 other = start; other < start + slots; ++other)
            place += expert_ids[other] < expert_ids[i] ||
                     (expert_ids[other] == expert_ids[i] && other < i);
        ordered_positions[place] = positions[i];
        ordered_weights[place] = (C)weights[i];
    }
}

// A block a token, a thread a column. `in_storage` rounds every product and every partial sum to S.
KERNEL combine(
    const Y *rows, const i64 *positions, const C *weights, S *output, i64 tokens, i64 slots,
    i64 hidden, i64 in_storage) {
    for (i64 token = blockIdx.x; token < tokens; token += gridDim.x) {
        const i64 *position = positions + token * slots;
        const C *weight = weights + token * slots;
        for (i64 column = threadIdx.x; column < hidden; column += blockDim.x) {
            C total = (C)0;
            for (i64 slot = 0; slot < slots; ++slot) {
                C product = weight[slot] * (C)widen(rows[position[slot] * hidden + column]);
                if (in_storage)
                    product = rounded<S, C>(product);
                total = slot == 0 ? product : total + product;
                if (in_storage)
                    total = rounded<S, C>(total);
            }
            narrow(total, output[token * hidden + column]);
        }
    }
}
