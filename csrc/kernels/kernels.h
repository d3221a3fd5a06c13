/* kernels.h: the arithmetic on a run of floats, as a table of functions for each instruction set.
 *
 * The scalar table is the specification, the fallback and the tail handler of the others; every table gives
 * the same bits as the scalar one for every length and alignment (compiled with -ffp-contract=off; only
 * correctly rounded operations are used). The formulas are those of torch.optim, so that a training run can
 * move here.
 */
#ifndef PYPS_KERNELS_H
#define PYPS_KERNELS_H

#include <fenv.h>
#include <stddef.h>

#include "kernels/codec.h"

enum { OPTIMIZERS = PYPS_ADAGRAD + 1 };
enum { MAX_STATES = 2 }; /* the most state vectors that an optimizer has */

/* One parameter's way from old to new: parameters and states are read from `old` and written to `new`, which
 * never overlap; `gradient` may be anything. new[0] is the parameters, new[1..] the states. */
struct step {
    float *new[1 + MAX_STATES];
    const float *old[1 + MAX_STATES];
    const float *gradient;
    float *copy; /* NULL, or where the new parameters go too, past the caches; a multiple of 16 */
    size_t length;
};

/* Constants of one step, or of a part of one, on one chunk: derived from pyps_hyper and the chunk's steps in one place.
 * Here for a whole step; kernels_constants says what they are for a part. */
struct step_constants {
    float scale;        /* the gradient is multiplied by it first */
    float clip;         /* then held within [-clip, clip]; infinite: no bound */
    float lr;           /* Adam, AdamW: lr / (1 - beta1^t); Adagrad: lr / (1 + (t - 1) lr_decay) */
    float weight_decay; /* added as weight_decay * parameter; AdamW: 0 */
    float momentum;
    float gain; /* 1 - dampening; 1 on the first step, as torch does */
    float carried,
        direct; /* the way is lr * (carried * new momentum + direct * gradient): 1, 0; Nesterov: momentum, 1 */
    float shrink; /* AdamW: 1 - lr * weight_decay; Adam: 1 */
    float beta2;
    float one_minus_beta1; /* 1 - beta1 */
    float one_minus_beta2; /* 1 - beta2 */
    float mean, calm;      /* Adam: the square of d + calm * (mean * old momentum - d) is averaged */
    float root_correction; /* sqrt(1 - beta2^t) */
    float eps;
    float part; /* Adagrad: of the step: 1 */
    struct ahead {
        float carried, direct;
        float eps;
    } ahead; /* the copy is so much further on: kernels_ahead */
};

/* Where parameters will be some steps later. */
struct look {
    float *to;
    const float *from[1 + MAX_STATES];
    const float *gradient; /* NULL: zero */
    size_t length;
    struct ahead ahead;
    float scale, clip; /* of the gradient, as in step_constants */
    bool streams;      /* past the caches; `to` is a multiple of 16 */
};

/* Stochastic rounding: a value goes up with the chance that makes its mean the value itself. The noise depends on these,
 * and on the value's index, alone. */
struct rounding {
    uint64_t seed, version, first; /* index of the first value */
};

struct kernels {
    const char *name;
    /* By optimizer; false: a gradient was not finite, and so is what was written. */
    bool (*update[OPTIMIZERS])(const struct step *step, const struct step_constants *constants);
    void (*look[OPTIMIZERS])(const struct look *look); /* NULL: it has no momentum */
    /* sum[i] = weight * x[i], or += for the second */
    void (*multiply)(float *sum, const float *x, float weight, size_t length);
    void (*multiply_add)(float *sum, const float *x, float weight, size_t length);
    void (*divide)(float *x, float divisor, size_t length);
    /* The sum of squares in fp64: that of index i goes to sum i % 16, and then 16 sums become 8, 4, 2 and 1. */
    double (*square_sum)(const float *x, size_t length);
    bool (*finite)(const float *x, size_t length); /* whether every float is */
    /* A copy that bypasses the caches, for data that is not read again soon. Call `copied` after the last
     * one, before another thread may read the data. */
    void (*stream)(float *to, const float *from, size_t length);
    void (*copied)(void);
    bool (*encode)(struct encoding *e); /* false: stopped at a value that is not finite */
    void (*decode)(uint32_t codec, float *out, const uint8_t *codes, const float *scales, size_t count);
    /* To bf16 without saturation; `how` NULL: to nearest. */
    void (*narrow)(uint8_t *to, const float *from, size_t length, const struct rounding *how);
};

extern const struct kernels kernels_scalar;
#if defined(__x86_64__)
extern const struct kernels kernels_avx2, kernels_avx512;
#elif defined(__aarch64__)
extern const struct kernels kernels_neon;
#endif

/* The table in use: that of PYPS_ISA=scalar|avx2|avx512|neon if this processor has it, else its best one.
 * Chosen once. */
const struct kernels *kernels_chosen(void);

/* The floating-point mode of a thread is its program's: it may flush the smallest numbers to zero. What all participants
 * compute alike they compute in the default one, between these two. */
static inline fenv_t kernels_enter(void) {
    fenv_t callers;
    fegetenv(&callers);
    fesetenv(FE_DFL_ENV);
    return callers;
}
static inline void kernels_leave(const fenv_t *callers) { fesetenv(callers); }

/* How many state vectors an optimizer keeps; 0 for an unknown one; callers check that before. */
unsigned kernels_states(unsigned optimizer);

/* `part` of a step is taken, after `steps` on this chunk. */
struct step_constants kernels_constants(unsigned optimizer, const pyps_hyper *hyper, float scale,
                                        double steps, float part);

/* The way of the next `distance` steps if all their gradients are g: carried m + direct g (Adam: over sqrt(v) + eps);
 * carried is 0: there is no momentum. Weight decay is left out. g is the less like those gradients the longer the
 * distance: above 1 it counts for a step of 1 / distance^2. `rounds`: these steps are rounds, and there is no g. Then
 * Adam's are expected to be like their mean, and half a step more does best; other optimizers' workers know their part
 * (pyps/step/own.py). */
struct ahead kernels_ahead(unsigned optimizer, const pyps_hyper *hyper, double steps, double distance,
                           bool rounds);
float kernels_root(const pyps_hyper *hyper, double steps); /* Adam's root_correction */

#endif
