// Values added into the rows of a target, without atomics: `order` sorts the rows stably, the first
// of equal rows adds all of them in the order they came. S is the type of target and values, C its
// compute type.

KERNEL add_rows(
    S *target, const i64 *rows, const i64 *order, const S *values, i64 count, i64 width) {
    for (i64 i = first_index(); i < count * width; i += index_stride()) {
        i64 place = i / width;
        i64 column = i % width;
        i64 row = rows[order[place]];
        if (place > 0 && rows[order[place - 1]] == row)
            continue;
        C total = widen(target[row * width + column]);
        for (i64 next = place; next < count && rows[order[next]] == row; ++next)
            total = rounded<S, C>(total + (C)widen(values[order[next] * width + column]));
        narrow(total, target[row * width + column]);
    }
}
