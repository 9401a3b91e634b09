// dw = sum over I of b * a, a row of b and of a each (contract 7 and 8). S is the type of b and a, W
// that of dw, C the type of the sum.

// One owner a weight, a fixed order: 32 products at a time, so that the error of a long sum grows
// with its length over 32.
KERNEL weight_gradient_serial(const S *b, const S *activation, W *dweights, i64 rows, i64 width) {
    for (i64 row = first_index(); row < rows; row += index_stride()) {
        const S *b_I = b + row * width;
        const S *a_I = activation + row * width;
        C total = (C)0;
        for (i64 start = 0; start < width; start += 32) {
            C part = (C)0;
            for (i64 i = start; i < start + 32 && i < width; ++i)
                part = part + (C)widen(b_I[i]) * (C)widen(a_I[i]);
            total = total + part;
        }
        dweights[row] = (W)total;
    }
}

// A 32-lane plane a weight: each lane sums every 32nd product, then the lanes are folded in half.
KERNEL weight_gradient_plane(const S *b, const S *activation, W *dweights, i64 rows, i64 width) {
    i64 lane = threadIdx.x % 32;
    for (i64 row = first_index() / 32; row < rows; row += index_stride() / 32) {
        const S *b_I = b + row * width;
        const S *a_I = activation + row * width;
        C part = (C)0;
        for (i64 i = lane; i < width; i += 32)
            part = part + (C)widen(b_I[i]) * (C)widen(a_I[i]);
        for (int distance = 16; distance > 0; distance /= 2)
            part = part + __shfl_down_sync(0xffffffffu, part, distance);
        if (lane == 0)
            dweights[row] = (W)part;
    }
}
