// The four storage types, their widening and their rounding, in plain C++.
//
// Nothing is included: the text compiles with NVRTC where no CUDA header is installed, and with a
// host compiler, which is how it is tested without a GPU. Every rounding is to nearest even, once:
// a double goes to 16 bits without stopping at float. Compile with contraction of a*b+c off, or
// products would not be rounded where contract 5 to 7 say.

#ifndef KERNEL
#define KERNEL extern "C" __global__ void
#endif

typedef long long i64;  // every index: T*K*H passes 2^31 in real layers

struct float16 {
    unsigned short bits;
};

struct bfloat16 {
    unsigned short bits;
};

__device__ inline double widen(double x) { return x; }

__device__ inline float widen(float x) { return x; }

__device__ inline float widen(bfloat16 x) { return __uint_as_float((unsigned)x.bits << 16); }

__device__ inline float widen(float16 x) {
    unsigned sign = ((unsigned)x.bits & 0x8000u) << 16;
    unsigned magnitude = ((unsigned)x.bits & 0x7fffu) << 13;
    if (magnitude >= 0x0f800000u)  // inf and NaN: the exponent is all ones
        return __uint_as_float(sign | 0x70000000u | magnitude);
    // 2^112 moves the exponent from the one bias to the other, of subnormal numbers too.
    float value = __uint_as_float(magnitude) * 5192296858534827628530496329220096.0f;
    return __uint_as_float(sign | __float_as_uint(value));
}

// The float that holds an odd last bit where x does not fit: rounding it again is rounding x once.
__device__ inline float to_odd(double x) {
    float nearest = (float)x;
    double back = nearest;
    if (back == x || x != x)
        return nearest;
    unsigned bits = __float_as_uint(nearest);
    bool beyond = x < 0.0 ? back < x : back > x;
    return __uint_as_float((beyond ? bits - 1u : bits) | 1u);
}

__device__ inline void narrow(double x, double &y) { y = x; }

__device__ inline void narrow(double x, float &y) { y = (float)x; }

__device__ inline void narrow(float x, double &y) { y = x; }

__device__ inline void narrow(float x, float &y) { y = x; }

__device__ inline void narrow(float x, bfloat16 &y) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        y.bits = (unsigned short)((bits >> 16 & 0x8000u) | 0x7fc0u);
    else
        y.bits = (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

__device__ inline void narrow(float x, float16 &y) {
    unsigned bits = __float_as_uint(x);
    unsigned sign = bits >> 16 & 0x8000u;
    unsigned magnitude = bits & 0x7fffffffu;
    unsigned result;
    if (magnitude > 0x7f800000u)
        result = 0x7e00u;
    else if (magnitude >= 0x477ff000u)  // 65520 is halfway to the first number there is not
        result = 0x7c00u;
    else if (magnitude < 0x38800000u)  // subnormal: the last place of 0.5 is that of the result
        result = __float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u;
    else
        result = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    y.bits = (unsigned short)(sign | result);
}

__device__ inline void narrow(double x, bfloat16 &y) { narrow(to_odd(x), y); }

__device__ inline void narrow(double x, float16 &y) { narrow(to_odd(x), y); }

// Rounded to S, and wide again.
template <class S, class C>
__device__ inline C rounded(C x) {
    S narrowed;
    narrow(x, narrowed);
    return (C)widen(narrowed);
}

// One thread an element, and again a whole grid further.
__device__ inline i64 first_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

__device__ inline i64 index_stride() { return (i64)gridDim.x * blockDim.x; }
