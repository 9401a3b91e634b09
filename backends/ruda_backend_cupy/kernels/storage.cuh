// The four storage types, their widening and their rounding, in plain C++.
//
// Nothing is included: the text compiles with NVRTC where no CUDA header is installed, and with a
// host compiler, which is how it is tested without a GPU. Every rounding is to nearest even, once:
// a double goes to 16 bits without stopping at float. Two options matter: contraction of a*b+c must
// be off, or products are not rounded where contract 5 to 7 say; and CuPy compiles everything with
// float32 subnormals flushed to zero, so no conversion here makes one on its way to a number that
// is none: 16-bit subnormals come through unharmed.

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
    float value = magnitude >= 0x00800000u ? __uint_as_float(magnitude + 0x38000000u)
                                           : (float)(magnitude >> 13) * 5.9604644775390625e-8f;
    return __uint_as_float(sign | __float_as_uint(value));
}

// The 16 bits nearest to a double, by its bits; a carry out of the fraction is the next exponent.
template <int FRACTION, int BIAS>
__device__ inline unsigned short narrow_double(double x) {
    unsigned long long bits = (unsigned long long)__double_as_longlong(x);
    unsigned long long magnitude = bits & 0x7fffffffffffffffull;
    unsigned sign = (unsigned)(bits >> 48) & 0x8000u;
    unsigned infinity = (2u * BIAS + 1u) << FRACTION;
    if (magnitude > 0x7ff0000000000000ull)
        return (unsigned short)(sign | infinity | 1u << (FRACTION - 1));
    int exponent = (int)(magnitude >> 52) - 1023;
    if (exponent > BIAS)
        return (unsigned short)(sign | infinity);
    int dropped = 52 - FRACTION;
    if (exponent >= 1 - BIAS) {
        magnitude -= (unsigned long long)(1023 - BIAS) << 52;
    } else {  // subnormal: the fraction with its leading one, moved down
        dropped += 1 - BIAS - exponent;
        if (dropped > 53)
            return (unsigned short)sign;
        magnitude = (magnitude & 0x000fffffffffffffull) | 0x0010000000000000ull;
    }
    unsigned long long odd = magnitude >> dropped & 1ull;
    magnitude = (magnitude + (1ull << (dropped - 1)) - 1ull + odd) >> dropped;
    return (unsigned short)(sign | (unsigned)magnitude);
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

__device__ inline void narrow(double x, bfloat16 &y) { y.bits = narrow_double<7, 127>(x); }

__device__ inline void narrow(double x, float16 &y) { y.bits = narrow_double<10, 15>(x); }

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
