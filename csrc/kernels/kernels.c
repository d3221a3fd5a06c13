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
static bool has_f16c(void) { /* __builtin_cpu_supports of clang before 15 lacks this name */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && c & bit_F16C;
}
#endif

static bool supported(const struct kernels *k) {
#if defined(__x86_64__)
    if (k == &kernels_avx2) return __builtin_cpu_supports("avx2") && has_f16c();
    if (k == &kernels_avx512) return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
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

struct step_constants kernels_constants(unsigned optimizer, const pyps_hyper *h, float scale,
                                        uint64_t steps) {
    struct step_constants k = {.scale = scale, .lr = h->lr, .weight_decay = h->weight_decay};
    k.clip = h->clip > 0 ? h->clip : INFINITY;
    k.momentum = h->momentum;
    k.one_minus_dampening = steps == 0 ? 1.0f : 1.0f - h->dampening;
    k.nesterov = h->nesterov ? h->momentum : 0.0f;
    double t = (double)steps + 1;
    if (optimizer == PYPS_ADAGRAD) {
        k.lr = (float)((double)h->lr / (1 + (t - 1) * (double)h->lr_decay));
        k.eps = h->eps;
    }
    if (optimizer == PYPS_ADAMW || optimizer == PYPS_ADAM) {
        bool decoupled = optimizer == PYPS_ADAMW;
        k.lr = (float)((double)h->lr / (1 - pow((double)h->beta1, t)));
        k.shrink = decoupled ? (float)(1 - (double)h->lr * (double)h->weight_decay) : 1.0f;
        if (decoupled) k.weight_decay = 0;
        k.beta2 = h->beta2;
        k.one_minus_beta1 = (float)(1 - (double)h->beta1);
        k.one_minus_beta2 = (float)(1 - (double)h->beta2);
        k.root_correction = (float)sqrt(1 - pow((double)h->beta2, t));
        k.eps = h->eps;
    }
    return k;
}
