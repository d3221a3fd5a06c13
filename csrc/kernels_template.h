/* kernels_template.h: the kernels over an abstract vector. A file per instruction set defines
 *
 *     WIDTH, VEC, TARGET           lanes, type, function attribute
 *     LOAD, STORE, SET             unaligned access, broadcast
 *     ADD, SUB, MUL, DIV, SQRT     correctly rounded
 *     NAME(x), TABLE, TABLE_NAME   how its functions and its table are called
 *     TAIL(call)                   runs the scalar function on what is left; empty for scalar itself
 *
 * and includes this file. Each line is one rounding; their order is part of the specification.
 */
#include "kernels.h"

/* p - lr * (g + wd * p) */
TARGET static void NAME(sgd)(const struct step *s, const struct step_constants *k) {
    const VEC scale = SET(k->scale), lr = SET(k->lr), decay = SET(k->weight_decay);
    const float *p = s->old[0], *g = s->gradient;
    float *q = s->new[0];
    size_t i = 0;
    for (; i + WIDTH <= s->length; i += WIDTH) {
        VEC x = LOAD(p + i);
        VEC d = ADD(MUL(scale, LOAD(g + i)), MUL(decay, x));
        STORE(q + i, SUB(x, MUL(lr, d)));
    }
    TAIL(update[PYPS_SGD]);
}

/* m' = momentum * m + undamped * d; p - lr * (nesterov ? d + momentum * m' : m') */
TARGET static void NAME(momentum)(const struct step *s, const struct step_constants *k) {
    const VEC scale = SET(k->scale), lr = SET(k->lr), decay = SET(k->weight_decay);
    const VEC mu = SET(k->momentum), undamped = SET(k->undamped), ahead = SET(k->nesterov);
    const float *p = s->old[0], *m = s->old[1], *g = s->gradient;
    float *q = s->new[0], *n = s->new[1];
    size_t i = 0;
    for (; i + WIDTH <= s->length; i += WIDTH) {
        VEC x = LOAD(p + i);
        VEC d = ADD(MUL(scale, LOAD(g + i)), MUL(decay, x));
        VEC v = ADD(MUL(mu, LOAD(m + i)), MUL(undamped, d));
        STORE(n + i, v);
        VEC u = k->nesterov != 0.0f ? ADD(d, MUL(ahead, v)) : v;
        STORE(q + i, SUB(x, MUL(lr, u)));
    }
    TAIL(update[PYPS_MOMENTUM]);
}

/* m' = m + (1-b1)(g - m); v' = b2 v + (1-b2) g g; p (1 - lr wd) - lr/c1 * m' / (sqrt(v')/sqrt(c2) + eps) */
TARGET static void NAME(adamw)(const struct step *s, const struct step_constants *k) {
    const VEC scale = SET(k->scale), lr = SET(k->lr), shrink = SET(k->shrink), eps = SET(k->eps);
    const VEC fresh1 = SET(k->fresh1), beta2 = SET(k->beta2), fresh2 = SET(k->fresh2);
    const VEC root = SET(k->root_correction);
    const float *p = s->old[0], *m = s->old[1], *v = s->old[2], *g = s->gradient;
    float *q = s->new[0], *mm = s->new[1], *vv = s->new[2];
    size_t i = 0;
    for (; i + WIDTH <= s->length; i += WIDTH) {
        VEC d = MUL(scale, LOAD(g + i));
        VEC m1 = LOAD(m + i);
        m1 = ADD(m1, MUL(fresh1, SUB(d, m1)));
        VEC v1 = ADD(MUL(beta2, LOAD(v + i)), MUL(fresh2, MUL(d, d)));
        STORE(mm + i, m1);
        STORE(vv + i, v1);
        VEC below = ADD(DIV(SQRT(v1), root), eps);
        STORE(q + i, SUB(MUL(shrink, LOAD(p + i)), DIV(MUL(lr, m1), below)));
    }
    TAIL(update[PYPS_ADAMW]);
}

TARGET static void NAME(weigh)(float *sum, const float *x, float weight, size_t length) {
    size_t i = 0;
    for (; i + WIDTH <= length; i += WIDTH) STORE(sum + i, MUL(SET(weight), LOAD(x + i)));
    for (; i < length; i++) sum[i] = weight * x[i];
}

TARGET static void NAME(weigh_add)(float *sum, const float *x, float weight, size_t length) {
    size_t i = 0;
    for (; i + WIDTH <= length; i += WIDTH) STORE(sum + i, ADD(LOAD(sum + i), MUL(SET(weight), LOAD(x + i))));
    for (; i < length; i++) sum[i] = sum[i] + weight * x[i];
}

TARGET static void NAME(divide)(float *x, float divisor, size_t length) {
    size_t i = 0;
    for (; i + WIDTH <= length; i += WIDTH) STORE(x + i, DIV(LOAD(x + i), SET(divisor)));
    for (; i < length; i++) x[i] = x[i] / divisor;
}

const struct kernels TABLE = {
    .name = TABLE_NAME,
    .update = {[PYPS_SGD] = NAME(sgd), [PYPS_MOMENTUM] = NAME(momentum), [PYPS_ADAMW] = NAME(adamw)},
    .weigh = NAME(weigh),
    .weigh_add = NAME(weigh_add),
    .divide = NAME(divide),
};
