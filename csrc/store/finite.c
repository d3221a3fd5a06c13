/* finite.c: refuses a gradient with NaN or infinite values before it is admitted.
 *
 * All of it is looked at before the admission, so that a refused push changes nothing. That costs one more read of a
 * gradient that is applied as it lies there. Chunks are looked at from the last one to the first: the apply that
 * follows begins at the first, and finds those in the caches. Where a gradient is copied anyway, each chunk is looked
 * at while it is copied; where its norm is summed anyway (clip_norm.c), the norm says it. Where a push asks for zeros in
 * place of such values, they are looked for block by block while it is applied (gradient.c), which costs no read.
 */
#include <math.h>
#include <string.h>

#include "store/store.h"

static int refuse(const pyps_store *s, const float *values, uint64_t at, uint64_t length) {
    while (length-- > 1 && isfinite(*values)) values++, at++;
    uint32_t t = 0;
    while (t + 1 < s->geometry.tensors && at - s->tensors[t].offset >= s->tensors[t].elements) t++;
    return fail(PYPS_ENONFINITE, "push: %s of '%.159s' has a value that is not finite (%g)",
                at < s->trained ? "the gradient" : "the average", s->tensors[t].name, (double)*values);
}

static int check_run(const pyps_store *s, const float *values, uint64_t at, uint64_t length) {
    return kernels_chosen()->finite(values, length) ? PYPS_OK : refuse(s, values, at, length);
}

struct looking {
    const float *values;
    uint32_t first;
    float *to;
    a32 *refused; /* 1 + the last chunk that has a value that is not finite; 0: none */
};

/* A chunk before one that is refused is not looked at: the last one is the same whichever hand took it. */
static int look_at_taken(pyps_store *s, a32 *next, const void *what) {
    const struct looking *l = what;
    uint32_t count = s->geometry.chunks - l->first;
    for (uint32_t taken; (taken = next32_relaxed(next)) < count && !load32_acquire(l->refused);) {
        uint32_t chunk = s->geometry.chunks - 1 - taken;
        uint64_t at = (uint64_t)chunk * s->geometry.chunk_params;
        if (!kernels_chosen()->finite(l->values + at, s->chunks[chunk].length)) max32(l->refused, chunk + 1);
        else if (l->to) memcpy(l->to + at, l->values + at, s->geometry.chunk_params * sizeof *l->to);
    }
    return PYPS_OK;
}

int finite_check(pyps_store *s, const float *values, uint32_t first, float *to) {
    a32 refused = 0;
    struct looking looking = {values, first, to, &refused};
    crew_work(s, s->geometry.chunks - first, look_at_taken, &looking);
    if (!refused) return PYPS_OK;
    uint64_t at = (uint64_t)(refused - 1) * s->geometry.chunk_params;
    return refuse(s, values + at, at, s->chunks[refused - 1].length);
}

int finite_check_ranges(const pyps_store *s, const float *values, bool packed, const pyps_range *ranges,
                        uint64_t count) {
    int rc = PYPS_OK;
    for (uint64_t i = 0; i < count && !rc; i++) {
        struct run run = {ranges[i].first, ranges[i].first + ranges[i].count};
        rc = check_run(s, packed ? values : values + run.first, run.first, ranges[i].count);
        if (packed) values += ranges[i].count;
    }
    return rc;
}
