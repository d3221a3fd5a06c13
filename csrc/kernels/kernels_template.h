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

/* Hardware prefetchers stop at the end of a 4 KiB page. A step gains where the next page comes in time, into the second
 * cache (past the end of the data this has no effect). Codecs, looks and copies are slower with it. */
#define PREFETCH(p) __builtin_prefetch((p) + 1024, 0, 2)

/* What is done to every gradient, in registers before a loop begins. */
struct NAME(filter) {
    VEC scale, low, high, decay;
};

INLINE struct NAME(filter) NAME(filter_of)(float scale, float clip, float decay) {
    return (struct NAME(filter)){SET(scale), SET(-clip), SET(clip), SET(decay)};
}

/* clamp(scale * g, -clip, clip); a gradient that is NaN stays NaN */
INLINE VEC NAME(clamped)(const float *g, const struct NAME(filter) * f) {
    return LOWER(f->high, UPPER(f->low, MUL(f->scale, LOAD(g))));
}

/* the same + decay * x. `odd` stays 0 while all gradients are finite: g - g is 0, or NaN. */
INLINE VEC NAME(gradient)(const float *g, VEC x, const struct NAME(filter) * f, VEC *odd, bool decays) {
    *odd = ADD(*odd, SUB(LOAD(g), LOAD(g)));
    VEC d = NAME(clamped)(g, f);
    return decays ? ADD(d, MUL(f->decay, x)) : d;
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

/* The arguments, in copies that no store can change: they stay in registers. */
#define COPIES(step, constants)                                                                              \
    const struct step_constants own_ = *(constants), *k = &own_;                                             \
    const struct step run_ = *(step), *s = &run_;                                                            \
    const struct NAME(filter) f = NAME(filter_of)(k->scale, k->clip, k->weight_decay)

enum {
    NAME(line) = WIDTH == 1 ? 1 : 16,
    LONG_RUN = 8192
}; /* floats: of a cache line; of a run with many lines */

/* p - lr * d, from `places` places in turn, a line at each. */
INLINE bool NAME(sgd_loop)(const struct step *step, const struct step_constants *constants, size_t places) {
    COPIES(step, constants);
    VEC odd = SET(0.0f);
    const VEC lr = SET(k->lr);
    const float *p = s->old[0], *g = s->gradient;
    const size_t part = s->length / (places * NAME(line)) * NAME(line), end = places * part;
    for (size_t at = 0; at < part; at += NAME(line))
        for (size_t line = at; line < end; line += part)
            for (size_t i = line; i < line + NAME(line); i += WIDTH) {
                if (places == 1) PREFETCH(p + i), PREFETCH(g + i);
                VEC x = LOAD(p + i);
                NAME(put)(s, i, SUB(x, MUL(lr, NAME(gradient)(g + i, x, &f, &odd, true))));
            }
    TAIL(update[PYPS_SGD], end, NAME(none)(odd));
}

/* With so little to compute memory sets the pace, and four places keep it busier than one. They are no gain where there
 * are states too, which are further streams. */
TARGET static bool NAME(sgd)(const struct step *step, const struct step_constants *constants) {
    bool alone = WIDTH == 1 || step->length < LONG_RUN;
    return alone ? NAME(sgd_loop)(step, constants, 1) : NAME(sgd_loop)(step, constants, 4);
}

/* carried * m + direct * g */
INLINE VEC NAME(onward)(float carried, VEC m, float direct, VEC g) {
    return ADD(MUL(SET(carried), m), MUL(SET(direct), g));
}

/* Whether the way is the momentum itself. */
INLINE bool NAME(is_momentum)(const struct step_constants *k) {
    return k->direct == 0.0f && k->carried == 1.0f;
}

/* direct * d + carried * m, where it is not just m */
INLINE VEC NAME(way)(VEC d, VEC m, const struct step_constants *k) {
    return NAME(is_momentum)(k) ? m : NAME(onward)(k->carried, m, k->direct, d);
}

/* m' = momentum * m + gain * d; p - lr * (direct * d + carried * m') */
TARGET static bool NAME(momentum)(const struct step *step, const struct step_constants *constants) {
    COPIES(step, constants);
    VEC odd = SET(0.0f);
    const VEC mu = SET(k->momentum), gain = SET(k->gain), lr = SET(k->lr);
    const float *p = s->old[0], *m = s->old[1], *g = s->gradient;
    float *n = s->new[1];
    size_t i = 0;
    for (; i + WIDTH <= s->length; i += WIDTH) {
        PREFETCH(p + i);
        PREFETCH(g + i), PREFETCH(m + i);
        VEC x = LOAD(p + i), d = NAME(gradient)(g + i, x, &f, &odd, true);
        VEC v = ADD(MUL(mu, LOAD(m + i)), MUL(gain, d));
        STORE(n + i, v);
        x = SUB(x, MUL(lr, NAME(way)(d, v, k)));
        if (k->ahead.carried == 0.0f) NAME(put)(s, i, x);
        else
            NAME(put_ahead)(s, i, x,
                            NAME(onward)(k->ahead.carried, v, k->ahead.direct, NAME(clamped)(g + i, &f)));
    }
    TAIL(update[PYPS_MOMENTUM], i, NAME(none)(odd));
}

/* Kinds of a step of Adam. The compiler makes a loop of its own for each, whose constants fit the registers. The first
 * two are of a gradient to which no decay is added, and without look-ahead. */
enum { NAME(adam_whole), NAME(adam_part), NAME(adam_any) };

/* Adam and AdamW: m' = m + (1-b1)(d - m); v' = b2 v + (1-b2) c c, c = d + calm (mean m - d);
 * p shrink - lr/c1 * (direct d + carried m') / (sqrt(v')/sqrt(c2) + eps). */
INLINE bool NAME(adam_loop)(const struct step *step, const struct step_constants *constants, int kind) {
    COPIES(step, constants);
    VEC odd = SET(0.0f);
    const bool whole = kind == NAME(adam_whole), part = kind == NAME(adam_part);
    const VEC lr = SET(k->lr), shrink = SET(k->shrink), eps = SET(k->eps), root = SET(k->root_correction);
    const VEC one_minus_beta1 = SET(k->one_minus_beta1), beta2 = SET(k->beta2);
    const VEC one_minus_beta2 = SET(k->one_minus_beta2), mean = SET(k->mean), calm = SET(k->calm);
    const float *p = s->old[0], *m = s->old[1], *v = s->old[2], *g = s->gradient;
    float *mm = s->new[1], *vv = s->new[2];
    size_t i = 0;
    for (; i + WIDTH <= s->length; i += WIDTH) {
        PREFETCH(p + i), PREFETCH(g + i), PREFETCH(m + i), PREFETCH(v + i);
        VEC x = LOAD(p + i), m1 = LOAD(m + i);
        VEC d = NAME(gradient)(g + i, x, &f, &odd, kind == NAME(adam_any));
        VEC c = whole || (!part && k->calm == 0.0f) ? d : ADD(d, MUL(calm, SUB(MUL(mean, m1), d)));
        m1 = ADD(m1, MUL(one_minus_beta1, SUB(d, m1)));
        VEC v1 = ADD(MUL(beta2, LOAD(v + i)), MUL(one_minus_beta2, MUL(c, c)));
        STORE(mm + i, m1);
        STORE(vv + i, v1);
        VEC way = whole ? m1 : part ? NAME(onward)(k->carried, m1, k->direct, d) : NAME(way)(d, m1, k);
        VEC v_root = SQRT(v1), below = ADD(DIV(v_root, root), eps);
        x = SUB(MUL(shrink, x), DIV(MUL(lr, way), below));
        if (whole || part || k->ahead.carried == 0.0f) {
            NAME(put)(s, i, x);
            continue;
        }
        VEC on = NAME(onward)(k->ahead.carried, m1, k->ahead.direct, NAME(clamped)(g + i, &f));
        NAME(put_ahead)(s, i, x, DIV(on, ADD(v_root, SET(k->ahead.eps))));
    }
    TAIL(update[PYPS_ADAM], i, NAME(none)(odd));
}

TARGET static bool NAME(adam)(const struct step *step, const struct step_constants *constants) {
    const struct step_constants *k = constants;
    bool plain = k->weight_decay == 0.0f && k->ahead.carried == 0.0f;
    if (plain && k->calm == 0.0f && NAME(is_momentum)(k)) return NAME(adam_loop)(step, k, NAME(adam_whole));
    if (plain && k->calm != 0.0f && !NAME(is_momentum)(k)) return NAME(adam_loop)(step, k, NAME(adam_part));
    return NAME(adam_loop)(step, k, NAME(adam_any));
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
        PREFETCH(g + i), PREFETCH(sum + i);
        VEC x = LOAD(p + i), d = NAME(gradient)(g + i, x, &f, &odd, true);
        VEC s1 = ADD(LOAD(sum + i), MUL(part, MUL(d, d)));
        STORE(sums + i, s1);
        NAME(put)(s, i, SUB(x, DIV(MUL(lr, d), ADD(SQRT(s1), eps))));
    }
    TAIL(update[PYPS_ADAGRAD], i, NAME(none)(odd));
}

INLINE void NAME(place)(const struct look *l, size_t i, VEC x) {
    if (l->streams) STREAM(l->to + i, x);
    else STORE(l->to + i, x);
}

/* The way of element i and those after it, without Adam's root. */
INLINE VEC NAME(look_on)(const struct look *l, size_t i) {
    const VEC m = LOAD(l->from[1] + i);
    if (!l->gradient) return MUL(SET(l->ahead.carried), m);
    const struct NAME(filter) f = NAME(filter_of)(l->scale, l->clip, 0);
    return NAME(onward)(l->ahead.carried, m, l->ahead.direct, NAME(clamped)(l->gradient + i, &f));
}

/* p - (carried m + direct g) */
TARGET static void NAME(look_momentum)(const struct look *l) {
    const float *p = l->from[0];
    size_t i = 0;
    for (; i + WIDTH <= l->length; i += WIDTH) {
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
        VEC below = ADD(SQRT(LOAD(v + i)), eps);
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

/* Vectors of the compiler's own, as wide as a register: of a wider one, gcc keeps the parts in memory. */
enum { NAME(register) = sizeof(VEC) < 16 ? 16 : sizeof(VEC), NAME(lanes) = NAME(register) / 4 };
typedef float NAME(floats) __attribute__((vector_size(NAME(register))));
typedef float NAME(half_floats) __attribute__((vector_size(NAME(register) / 2)));
typedef double NAME(doubles) __attribute__((vector_size(NAME(register))));

/* A square of a float is exact in fp64, so each term is one rounding. */
TARGET static double NAME(square_sum)(const float *x, size_t length) {
    enum { LANES_EACH = NAME(lanes) / 2, SUMS = 16 / LANES_EACH };
    NAME(doubles) sums[SUMS] = {{0}};
    size_t i = 0;
    for (; i + 16 <= length; i += 16) {
        for (int k = 0; k < SUMS; k++) {
            NAME(half_floats) part;
            memcpy(&part, x + i + LANES_EACH * k, sizeof part);
            NAME(doubles) wide = __builtin_convertvector(part, NAME(doubles));
            sums[k] += wide * wide;
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
    NAME(floats) sums[4] = {{0}, {0}, {0}, {0}};
    size_t quarter = length / (4 * NAME(lanes)) * NAME(lanes);
    for (size_t i = 0; i < quarter; i += NAME(lanes))
        for (size_t k = 0; k < 4; k++) {
            NAME(floats) part;
            memcpy(&part, x + k * quarter + i, sizeof part);
            sums[k] += part - part;
        }
    float all[NAME(lanes)], sum = 0;
    sums[0] += sums[1], sums[2] += sums[3], sums[0] += sums[2];
    memcpy(all, sums, sizeof all);
    for (size_t i = 4 * quarter; i < length; i++) sum += x[i] - x[i];
    for (int lane = 0; lane < NAME(lanes); lane++) sum += all[lane];
    return sum == 0;
}

TARGET static void NAME(stream)(float *to, const float *from, size_t length) {
    size_t i = 0;
    for (; i < length && (uintptr_t)(to + i) % 16; i++) to[i] = from[i];
    for (; i + WIDTH <= length; i += WIDTH) {
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
