// SwiGLU and its backward, element by element, rounded to S after every step (contract 5 and 7).
// S is the type of all operands, C its compute type.

__device__ inline float exponential(float x) { return expf(x); }

__device__ inline double exponential(double x) { return exp(x); }

__device__ inline C sigmoid(C x) {
    bool positive = x > (C)0;
    C z = exponential(positive ? -x : x);
    return (positive ? (C)1 : z) / (z + (C)1);
}

KERNEL swiglu(const S *gate_output, const S *up_output, S *activation, i64 size) {
    for (i64 i = first_index(); i < size; i += index_stride()) {
        C g = widen(gate_output[i]);
        C s = rounded<S, C>(g * sigmoid(g));
        narrow(s * (C)widen(up_output[i]), activation[i]);
    }
}

KERNEL swiglu_backward(
    const S *gate_output, const S *up_output, const S *da, S *dg, S *du, i64 size) {
    for (i64 i = first_index(); i < size; i += index_stride()) {
        C g = widen(gate_output[i]);
        C upstream = widen(da[i]);
        C sigma = sigmoid(g);
        C s = rounded<S, C>(g * sigma);
        C m = rounded<S, C>(upstream * (C)widen(up_output[i]));
        C slope = sigma * (g * ((C)1 - sigma) + (C)1);
        narrow(m * slope, dg[i]);
        narrow(upstream * s, du[i]);
    }
}
