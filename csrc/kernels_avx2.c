/* kernels_avx2.c: eight lanes. No FMA: one rounding more or less would not be the scalar's bits. */
#if defined(__x86_64__)
#include <immintrin.h>

#define WIDTH       8
#define VEC         __m256
#define TARGET      __attribute__((target("avx2")))
#define LOAD(p)     _mm256_loadu_ps(p)
#define STORE(p, x) _mm256_storeu_ps(p, x)
#define SET(x)      _mm256_set1_ps(x)
#define ADD(a, b)   _mm256_add_ps(a, b)
#define SUB(a, b)   _mm256_sub_ps(a, b)
#define MUL(a, b)   _mm256_mul_ps(a, b)
#define DIV(a, b)   _mm256_div_ps(a, b)
#define SQRT(a)     _mm256_sqrt_ps(a)
#define NAME(x)     avx2_##x
#define TABLE       kernels_avx2
#define TABLE_NAME  "avx2"

/* The rest of a step, from element i on. */
#define TAIL(member)                                                                                         \
    do {                                                                                                     \
        struct step rest = *s;                                                                               \
        rest.gradient += i, rest.length -= i;                                                                \
        for (int t = 0; t < 1 + MAX_STATES; t++)                                                             \
            if (rest.new[t]) rest.new[t] += i, rest.old[t] += i;                                             \
        if (rest.length) kernels_scalar.member(&rest, k);                                                    \
    } while (0)

#include "kernels_template.h"
#endif
