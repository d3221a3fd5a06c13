/* kernels.c: which instruction set to use, and the constants of one step. */
#include "kernels.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static const struct kernels *chosen;

static const struct kernels *best(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return &kernels_avx2;
#endif
    return &kernels_scalar;
}

static void choose(void) {
    const char *wanted = getenv("PYPS_ISA");
    chosen = wanted && strcmp(wanted, kernels_scalar.name) == 0 ? &kernels_scalar : best();
}

const struct kernels *kernels_chosen(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose);
    return chosen;
}

const char *pyps_isa(void) { return kernels_chosen()->name; }

unsigned kernels_states(unsigned optimizer) {
    static const unsigned states[] = {[PYPS_SGD] = 0, [PYPS_MOMENTUM] = 1, [PYPS_ADAMW] = 2};
    return optimizer < sizeof states / sizeof *states ? states[optimizer] : 0;
}

struct step_constants kernels_constants(unsigned optimizer, const pyps_hyper *h, float scale,
                                        uint64_t steps) {
    struct step_constants k = {.scale = scale, .lr = h->lr, .weight_decay = h->weight_decay};
    k.momentum = h->momentum;
    k.undamped = steps == 0 ? 1.0f : 1.0f - h->dampening;
    k.nesterov = h->nesterov ? h->momentum : 0.0f;
    if (optimizer == PYPS_ADAMW) {
        double t = (double)steps + 1;
        k.lr = (float)((double)h->lr / (1 - pow((double)h->beta1, t)));
        k.shrink = (float)(1 - (double)h->lr * (double)h->weight_decay);
        k.beta2 = h->beta2;
        k.fresh1 = (float)(1 - (double)h->beta1);
        k.fresh2 = (float)(1 - (double)h->beta2);
        k.root_correction = (float)sqrt(1 - pow((double)h->beta2, t));
        k.eps = h->eps;
    }
    return k;
}
