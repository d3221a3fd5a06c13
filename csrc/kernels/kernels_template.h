/* kernels_template.h: the kernels over an abstract vector. A file for an instruction set defines
 *
 *     WIDTH, VEC, TARGET           lanes, type, function attribute
 *     LOAD, STORE, SET             unaligned access, broadcast
 *     ADD, SUB, MUL, DIV, SQRT     correctly rounded
 *     LOWER(a, b), UPPER(a, b)     a < b ? a : b, a > b ? a : b; so b if either is NaN
 *     STREAM, STREAM_END           a store past the caches, to a multiple of 16; a fence after the last
 *     NAME(x), TABLE, TABLE_NAME   the names of its functions and its table
 *     TAIL(call, sound)            run the scalar function on what is left (scalar itself: nothing), and return whether
 *                                  it was finite, and `sound`
 *     LOOK_TAIL(call)              the same, without a result
 *
 * and the integer operations of codec_template.h, then includes this file. Each line is one rounding; their
 * order is part of the specification.
 */
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

#include "kernels/codec_template.h"

/* clamp(scale * g, -clip, clip); a gradient that is NaN stays NaN */
INLINE VEC NAME(clamped)(const float *g, float scale, float clip) {
    return LOWER(SET(clip), UPPER(SET(-clip), MUL(SET(scale), LOAD(g))));
}

/* the same + decay * x. `odd` stays 0 while all gradients are finite: g - g is 0, or NaN. */
INLINE VEC NAME(gradient)(const float *g, VEC x, const struct step_constants *k, VEC *odd) {
    PREFETCH(g);
    *odd = ADD(*odd, SUB(LOAD(g), LOAD(g)));
    return ADD(NAME(clamped)(g, k->scale, k->clip), MUL(SET(k->weight_decay), x));
}

/* Whether all lanes are 0. */
INLINE bool NAME(none)(VEC odd) {
    float lanes[WIDTH], sum = 0;
    STORE(lanes, odd);
    for (int lane = 0; lane < WIDTH; lane++) sum += lanes[lane];
    return sum == 0;
}

INLINE void NAME(put)(const struct step *s, size_t i, VEC x) {
    STORE(s->new[0] + i, x);
    if (s->copy) STREAM(s->copy + i, x);
}

/* The copy is `way` further on. */
INLINE void NAME(put_ahead)(const struct step *s, size_t i, VEC x, VEC way) {
    STORE(s->new[0] + i, x);
    if (s->copy) STREAM(s->copy + i, SUB(x, way));
}

/* In copies that no store can change, so that they stay in registers. */
#define COPIES(step, constants)                                                                              \
    const struct step_constants own_ = *(constants), *k = &own_;                                             \
    const struct step run_ = *(step), *s = &run_

/* p - lr * d */
TARGET static bool NAME(sgd)(const struct step *step, const struct step_constants *constants) {
    COPIES(step, constants);
    VEC odd = SET(0.0f);
    const float *p = s->old[0], *g = s->gradient;
    size_t i = 0;
    for (; i + WIDTH <= s->length; i += WIDTH) {
        PREFETCH(p + i);
        VEC x = LOAD(p + i);
        NAME(put)(s, i, SUB(x, MUL(SET(k->lr), NAME(gradient)(g + i, x, k, &odd))));
    }
    TAIL(update[PYPS_SGD], NAME(none)(odd));
}

/* carried * m + direct * g */
INLINE VEC NAME(onward)(const struct ahead *a, VEC m, VEC g) {
    return ADD(MUL(SET(a->carried), m), MUL(SET(a->direct), g));
}

/* direct * d + carried * m, where it is not just m */
INLINE VEC NAME(way)(VEC d, VEC m, const struct step_constants *k) {
    if (k->direct == 0.0f && k->carried == 1.0f) return m;
    return ADD(MUL(SET(k->direct), d), MUL(SET(k->carried), m));
}

/* m' = momentum * m + gain * d; p - lr * (direct * d + carried * m') */
TARGET static bool NAME(momentum)(const struct step *step, const struct step_constants *constants) {
    COPIES(step, constants);
    VEC odd = SET(0.0f);
    const VEC mu = SET(k->momentum), gain = SET(k->gain);
    const float *p = s->old[0], *m = s->old[1], *g = s->gradient;
    float *n = s->new[1];
    size_t i = 0;
    for (; i + WIDTH <= s->length; i += WIDTH) {
        PREFETCH(p + i);
        VEC x = LOAD(p + i), d = NAME(gradient)(g + i, x, k, &odd);
        PREFETCH(m + i);
        VEC v = ADD(MUL(mu, LOAD(m + i)), MUL(gain, d));
        STORE(n + i, v);
        x = SUB(x, MUL(SET(k->lr), NAME(way)(d, v, k)));
        if (k->ahead.carried == 0.0f) NAME(put)(s, i, x);
        else NAME(put_ahead)(s, i, x, NAME(onward)(&k->ahead, v, NAME(clamped)(g + i, k->scale, k->clip)));
    }
    TAIL(update[PYPS_MOMENTUM], NAME(none)(odd));
}

/* Adam and AdamW: m' = m + (1-b1)(d - m); v' = b2 v + (1-b2) c c, c = d + calm (mean m - d);
 * p shrink - lr/c1 * (direct d + carried m') / (sqrt(v')/sqrt(c2) + eps) */
TARGET static bool NAME(adam)(const struct step *step, const struct step_constants *constants) {
    COPIES(step, constants);
    VEC odd = SET(0.0f);
    const VEC lr = SET(k->lr), shrink = SET(k->shrink), eps = SET(k->eps), root = SET(k->root_correction);
    const VEC one_minus_beta1 = SET(k->one_minus_beta1), beta2 = SET(k->beta2);
    const VEC one_minus_beta2 = SET(k->one_minus_beta2), mean = SET(k->mean), calm = SET(k->calm);
    const float *p = s->old[0], *m = s->old[1], *v = s->old[2], *g = s->gradient;
    float *mm = s->new[1], *vv = s->new[2];
    size_t i = 0;
    for (; i + WIDTH <= s->length; i += WIDTH) {
        PREFETCH(p + i);
        VEC x = LOAD(p + i), d = NAME(gradient)(g + i, x, k, &odd), m1 = LOAD(m + i);
        PREFETCH(m + i), PREFETCH(v + i);
        VEC c = k->calm != 0.0f ? ADD(d, MUL(calm, SUB(MUL(mean, m1), d))) : d;
        m1 = ADD(m1, MUL(one_minus_beta1, SUB(d, m1)));
        VEC v1 = ADD(MUL(beta2, LOAD(v + i)), MUL(one_minus_beta2, MUL(c, c)));
        STORE(mm + i, m1);
        STORE(vv + i, v1);
        VEC v_root = SQRT(v1), below = ADD(DIV(v_root, root), eps);
        x = SUB(MUL(shrink, x), DIV(MUL(lr, NAME(way)(d, m1, k)), below));
        if (k->ahead.carried == 0.0f) {
            NAME(put)(s, i, x);
            continue;
        }
        VEC on = NAME(onward)(&k->ahead, m1, NAME(clamped)(g + i, k->scale, k->clip));
        NAME(put_ahead)(s, i, x, DIV(on, ADD(v_root, SET(k->ahead.eps))));
    }
    TAIL(update[PYPS_ADAM], NAME(none)(odd));
}

/* s' = s + part d d; p - lr_t * d / (sqrt(s') + eps) */
TARGET static bool NAME(adagrad)(const struct step *step, const struct step_constants *constants) {
    COPIES(step, constants);
    VEC odd = SET(0.0f);
    const VEC lr = SET(k->lr), eps = SET(k->eps), part = SET(k->part);
    const float *p = s->old[0], *sum = s->old[1], *g = s->gradient;
    float *sums = s->new[1];
    size_t i = 0;
    for (; i + WIDTH <= s->length; i += WIDTH) {
        PREFETCH(p + i);
        VEC x = LOAD(p + i), d = NAME(gradient)(g + i, x, k, &odd);
        PREFETCH(sum + i);
        VEC s1 = ADD(LOAD(sum + i), MUL(part, MUL(d, d)));
        STORE(sums + i, s1);
        NAME(put)(s, i, SUB(x, DIV(MUL(lr, d), ADD(SQRT(s1), eps))));
    }
    TAIL(update[PYPS_ADAGRAD], NAME(none)(odd));
}

INLINE void NAME(place)(const struct look *l, size_t i, VEC x) {
    if (l->streams) STREAM(l->to + i, x);
    else STORE(l->to + i, x);
}

/* The way of element i and those after it, without Adam's root. */
INLINE VEC NAME(look_on)(const struct look *l, size_t i) {
    const VEC m = LOAD(l->from[1] + i);
    PREFETCH(l->from[1] + i);
    if (!l->gradient) return MUL(SET(l->ahead.carried), m);
    PREFETCH(l->gradient + i);
    return NAME(onward)(&l->ahead, m, NAME(clamped)(l->gradient + i, l->scale, l->clip));
}

/* p - (carried m + direct g) */
TARGET static void NAME(look_momentum)(const struct look *l) {
    const float *p = l->from[0];
    size_t i = 0;
    for (; i + WIDTH <= l->length; i += WIDTH) {
        PREFETCH(p + i);
        NAME(place)(l, i, SUB(LOAD(p + i), NAME(look_on)(l, i)));
    }
    LOOK_TAIL(look[PYPS_MOMENTUM]);
}

/* p - (carried m + direct g) / (sqrt(v) + eps) */
TARGET static void NAME(look_adam)(const struct look *l) {
    const float *p = l->from[0], *v = l->from[2];
    const VEC eps = SET(l->ahead.eps);
    size_t i = 0;
    for (; i + WIDTH <= l->length; i += WIDTH) {
        PREFETCH(p + i);
        VEC below = ADD(SQRT(LOAD(v + i)), eps);
        PREFETCH(v + i);
        NAME(place)(l, i, SUB(LOAD(p + i), DIV(NAME(look_on)(l, i), below)));
    }
    LOOK_TAIL(look[PYPS_ADAM]);
}

TARGET static void NAME(multiply)(float *sum, const float *x, float weight, size_t length) {
    size_t i = 0;
    for (; i + WIDTH <= length; i += WIDTH) STORE(sum + i, MUL(SET(weight), LOAD(x + i)));
    for (; i < length; i++) sum[i] = weight * x[i];
}

TARGET static void NAME(multiply_add)(float *sum, const float *x, float weight, size_t length) {
    size_t i = 0;
    for (; i + WIDTH <= length; i += WIDTH) STORE(sum + i, ADD(LOAD(sum + i), MUL(SET(weight), LOAD(x + i))));
    for (; i < length; i++) sum[i] = sum[i] + weight * x[i];
}

TARGET static void NAME(divide)(float *x, float divisor, size_t length) {
    size_t i = 0;
    for (; i + WIDTH <= length; i += WIDTH) STORE(x + i, DIV(LOAD(x + i), SET(divisor)));
    for (; i < length; i++) x[i] = x[i] / divisor;
}

/* A square of a float is exact in fp64, so each term is one rounding. */
TARGET static double NAME(square_sum)(const float *x, size_t length) {
    typedef float floats __attribute__((vector_size(32)));
    typedef double doubles __attribute__((vector_size(64)));
    doubles sums[2] = {{0}, {0}};
    size_t i = 0;
    for (; i + 16 <= length; i += 16) {
        PREFETCH(x + i);
        for (int half = 0; half < 2; half++) {
            floats part;
            memcpy(&part, x + i + 8 * half, sizeof part);
            doubles wide = __builtin_convertvector(part, doubles);
            sums[half] += wide * wide;
        }
    }
    double all[16];
    memcpy(all, sums, sizeof all);
    for (; i < length; i++) all[i % 16] += (double)x[i] * (double)x[i];
    for (int width = 8; width; width /= 2)
        for (int lane = 0; lane < width; lane++) all[lane] += all[lane + width];
    return all[0];
}

/* x - x is 0 if x is finite, else NaN. Four places of the run are read in turn: one alone waits for its memory, and four
 * are as many as the hardware prefetches for at once. */
TARGET static bool NAME(finite)(const float *x, size_t length) {
    typedef float floats __attribute__((vector_size(64)));
    floats sums[4] = {{0}, {0}, {0}, {0}};
    size_t quarter = length / 64 * 16;
    for (size_t i = 0; i < quarter; i += 16)
        for (size_t k = 0; k < 4; k++) {
            floats part;
            memcpy(&part, x + k * quarter + i, sizeof part);
            sums[k] += part - part;
        }
    float all[16], sum = 0;
    sums[0] += sums[1], sums[2] += sums[3], sums[0] += sums[2];
    memcpy(all, sums, sizeof all);
    for (size_t i = 4 * quarter; i < length; i++) sum += x[i] - x[i];
    for (int lane = 0; lane < 16; lane++) sum += all[lane];
    return sum == 0;
}

TARGET static void NAME(stream)(float *to, const float *from, size_t length) {
    size_t i = 0;
    for (; i < length && (uintptr_t)(to + i) % 16; i++) to[i] = from[i];
    for (; i + WIDTH <= length; i += WIDTH) {
        PREFETCH(from + i);
        STREAM(to + i, LOAD(from + i));
    }
    for (; i < length; i++) to[i] = from[i];
}

TARGET static void NAME(copied)(void) { STREAM_END(); }

const struct kernels TABLE = {
    .name = TABLE_NAME,
    .update = {[PYPS_SGD] = NAME(sgd),
               [PYPS_MOMENTUM] = NAME(momentum),
               [PYPS_ADAMW] = NAME(adam),
               [PYPS_ADAM] = NAME(adam),
               [PYPS_ADAGRAD] = NAME(adagrad)},
    .look = {[PYPS_MOMENTUM] = NAME(look_momentum),
             [PYPS_ADAMW] = NAME(look_adam),
             [PYPS_ADAM] = NAME(look_adam)},
    .multiply = NAME(multiply),
    .multiply_add = NAME(multiply_add),
    .divide = NAME(divide),
    .square_sum = NAME(square_sum),
    .finite = NAME(finite),
    .stream = NAME(stream),
    .copied = NAME(copied),
    .encode = NAME(encode),
    .decode = NAME(decode),
    .narrow = NAME(narrow),
};
