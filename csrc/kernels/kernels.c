/* kernels.c: which instruction set to use, and the constants of one step. */
#include "kernels/kernels.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const struct kernels *chosen;

#if defined(__x86_64__)
/* What this processor has, and whether the system keeps its wide registers. Not by __builtin_cpu_supports, which is false
 * for all in programs of zig cc, as in the wheels. */
static bool has(unsigned of_leaf_7, uint64_t registers) {
    unsigned a, b, c, d, kept, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_F16C)) return false;
    __asm__("xgetbv" : "=a"(kept), "=d"(high) : "c"(0));
    if ((kept & registers) != registers) return false;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & of_leaf_7) == of_leaf_7;
}

enum { YMM = 0x06, ZMM = 0xe6 }; /* XCR0: the states of xmm and ymm; also of opmask and zmm */
#endif

static bool supported(const struct kernels *k) {
#if defined(__x86_64__)
    if (k == &kernels_avx2) return has(bit_AVX2, YMM);
    if (k == &kernels_avx512) return has(bit_AVX512F | bit_AVX512BW, ZMM);
#endif
#if defined(__aarch64__)
    if (k == &kernels_neon) return true; /* every 64-bit Arm has it */
#endif
    return k == &kernels_scalar;
}

/* The best one first. The one that PYPS_ISA names is used if this processor has it, else the best. */
static void choose(void) {
    static const struct kernels *const all[] = {
#if defined(__x86_64__)
        &kernels_avx512, &kernels_avx2,
#elif defined(__aarch64__)
        &kernels_neon,
#endif
        &kernels_scalar};
    const char *wanted = getenv("PYPS_ISA");
    for (size_t i = sizeof all / sizeof *all; i-- > 0;)
        if (supported(all[i]) && (!chosen || !wanted || strcmp(wanted, chosen->name))) chosen = all[i];
}

const struct kernels *kernels_chosen(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose);
    return chosen;
}

const char *pyps_isa(void) { return kernels_chosen()->name; }

unsigned kernels_states(unsigned optimizer) {
    static const unsigned states[] = {
        [PYPS_SGD] = 0, [PYPS_MOMENTUM] = 1, [PYPS_ADAMW] = 2, [PYPS_ADAM] = 2, [PYPS_ADAGRAD] = 1};
    return optimizer < OPTIMIZERS ? states[optimizer] : 0;
}

float kernels_root(const pyps_hyper *h, double steps) {
    return (float)sqrt(1 - pow((double)h->beta2, steps));
}

/* How far a part f of a step goes, of momentum m that becomes beta^f m + gain g. Several parts go as far as one step of
 * their sum with the same gradient, and one after another they go on as steps do:
 *
 *     f parts of a step go      a m + b g,  a = K (1 - beta^f) / (1 - beta),  b = R f - a M
 *
 * K: what is left of m in a whole step's way, beta (Nesterov: beta^2). M and R: momentum and way of a step, for each g,
 * once g has been the same for long. a and b as multiples of the new momentum and of g are `carried` and `direct`. */
static void set_way(struct step_constants *k, double beta, double part, double gain, double left, double rate,
                    double steady) {
    double kept = pow(beta, part), a = left * (1 - kept) / (1 - beta), b = rate * part - a * steady;
    k->carried = kept > 0 ? (float)(a / kept) : 0;
    k->direct = kept > 0 ? (float)(b - a / kept * gain) : (float)b;
}

static void momentum_constants(struct step_constants *k, const pyps_hyper *h, double steps, double part) {
    double beta = (double)h->momentum;
    bool first = steps + part / 2 < 1; /* the momentum that torch begins with is the gradient */
    k->momentum = h->momentum;
    k->gain = first ? 1.0f : 1.0f - h->dampening;
    k->carried = h->nesterov ? h->momentum : 1.0f, k->direct = h->nesterov ? 1.0f : 0.0f;
    if (part == 1) return;
    double steady = (double)k->gain / (1 - beta), gain = (1 - pow(beta, part)) * steady;
    double rate = h->nesterov ? beta * steady + 1 : steady, left = h->nesterov ? beta * beta : beta;
    set_way(k, beta, part, gain, left, rate, steady);
    k->momentum = (float)pow(beta, part), k->gain = (float)gain;
}

static void adam_constants(struct step_constants *k, const pyps_hyper *h, double steps, double part,
                           bool decoupled) {
    double beta1 = (double)h->beta1, beta2 = (double)h->beta2, lr = (double)h->lr, t = steps + part;
    double decay = decoupled ? lr * (double)h->weight_decay : 0, kept = pow(beta1, part);
    if (decoupled) k->weight_decay = 0;
    k->lr = (float)(lr / (1 - pow(beta1, t)));
    k->shrink = (float)(1 - decay), k->eps = h->eps;
    k->beta2 = h->beta2;
    k->one_minus_beta1 = (float)(1 - beta1), k->one_minus_beta2 = (float)(1 - beta2);
    k->root_correction = kernels_root(h, t);
    k->carried = 1;
    if (part == 1) return;
    double left = beta1 * (1 - kept) / (1 - beta1); /* of the momentum before, in the way */
    set_way(k, beta1, part, 1 - kept, beta1, 1, 1);
    k->lr = (float)(lr / (1 - left / part * pow(beta1, steps)));
    k->shrink = (float)(decay < 1 ? pow(1 - decay, part) : 1 - part * decay);
    k->beta2 = (float)pow(beta2, part);
    k->one_minus_beta1 = (float)(1 - kept), k->one_minus_beta2 = (float)(1 - pow(beta2, part));
    /* The gradient's noise is that of a part of the samples: shrink its distance from the mean. */
    if (steps > 0) k->mean = (float)(1 / (1 - pow(beta1, steps))), k->calm = (float)(1 - sqrt(part));
}

struct step_constants kernels_constants(unsigned optimizer, const pyps_hyper *h, float scale, double steps,
                                        float part) {
    struct step_constants k = {.scale = scale, .lr = h->lr, .weight_decay = h->weight_decay};
    k.clip = h->clip > 0 ? h->clip : INFINITY;
    if (optimizer == PYPS_SGD) k.lr *= part;
    if (optimizer == PYPS_MOMENTUM) momentum_constants(&k, h, steps, (double)part);
    if (optimizer == PYPS_ADAGRAD) {
        k.lr = (float)((double)part * (double)h->lr / (1 + steps * (double)h->lr_decay));
        k.part = part;
        k.eps = h->eps;
    }
    if (optimizer == PYPS_ADAMW || optimizer == PYPS_ADAM)
        adam_constants(&k, h, steps, (double)part, optimizer == PYPS_ADAMW);
    return k;
}

/* What is left of the momentum before in the way of a part of a step: a(f), with K = `left`. */
static double way_left(double beta, double left, double part) {
    return left * (1 - pow(beta, part)) / (1 - beta);
}

struct ahead kernels_ahead(unsigned optimizer, const pyps_hyper *h, double steps, double distance,
                           bool rounds) {
    bool adam = optimizer == PYPS_ADAMW || optimizer == PYPS_ADAM, nesterov = !adam && h->nesterov;
    if (!(steps > 0 && distance > 0) || (!adam && optimizer != PYPS_MOMENTUM)) return (struct ahead){0};
    double beta = (double)(adam ? h->beta1 : h->momentum), left = nesterov ? beta * beta : beta;
    double steady = adam ? 1 : (1 - (double)h->dampening) / (1 - beta);
    double rate = nesterov ? beta * steady + 1 : steady, root = adam ? (double)kernels_root(h, steps) : 1;
    double near = distance > 1 ? 1 / (distance * distance) : distance;
    double unit = (double)h->lr * root / (adam ? 1 - pow(beta, steps) : 1);
    double carried = adam && rounds ? distance + 0.5 : way_left(beta, left, distance);
    return (struct ahead){.carried = (float)(unit * carried),
                          .direct = (float)(unit * (rate * near - way_left(beta, left, near) * steady)),
                          .eps = (float)((double)h->eps * root)};
}
