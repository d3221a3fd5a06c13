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

int finite_check(const pyps_store *s, const float *values, uint32_t first, float *to) {
    for (uint32_t chunk = s->geometry.chunks; chunk-- > first;) {
        uint64_t at = (uint64_t)chunk * s->geometry.chunk_params;
        int rc = check_run(s, values + at, at, s->chunks[chunk].length);
        if (rc) return rc;
        if (to) memcpy(to + at, values + at, s->geometry.chunk_params * sizeof *to);
    }
    return PYPS_OK;
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
