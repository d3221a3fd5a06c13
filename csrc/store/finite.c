/* finite.c: refuses a gradient with NaN or infinite values before it is admitted.
 *
 * All of it is looked at before the admission, so that a refused push changes nothing. That costs one more read of a
 * gradient that is applied as it lies there, unless its worker has looked at it in cache, part by part, when it was
 * computed (`looked` of the push). Chunks are looked at from the last one to the first: the apply that
 * follows begins at the first, and finds those in the caches. Where a gradient is copied anyway, each chunk is looked
 * at while it is copied; where its norm is summed anyway (clip_norm.c), the norm says it. Where a push asks for zeros in
 * place of such values, they are looked for block by block while it is applied (gradient.c), which costs no read.
 */
#include <math.h>
#include <string.h>

#include "store/push.h"

#define PIECE       (16u * BLOCK)       /* looked at, and then copied from the cache */
#define STREAM_FROM (UINT64_C(1) << 20) /* floats: a copy so long bypasses the cache */

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
    struct unseen unseen;
    float *to;
    a32 *refused; /* 1 + the last chunk that has a value that is not finite; 0: none */
};

/* The next run of a chunk, from `at` on, that the caller has not looked at. */
static bool next_unseen(const struct unseen *u, uint64_t at, uint64_t end, struct run *run) {
    struct run looked;
    while (at < end && ranges_next(u->looked, u->looked_count, at, end, &looked) && looked.first == at)
        at = looked.end;
    *run = (struct run){at, end};
    if (at < end && ranges_next(u->looked, u->looked_count, at, end, &looked)) run->end = looked.first;
    return at < end;
}

static bool chunk_is_seen(const pyps_store *s, const struct unseen *u, uint32_t chunk) {
    uint64_t at = (uint64_t)chunk * s->geometry.chunk_params;
    struct run run;
    return !s->chunks[chunk].averaged && !next_unseen(u, at, at + s->chunks[chunk].length, &run);
}

static bool chunk_is_finite(const pyps_store *s, const struct unseen *u, uint32_t chunk) {
    uint64_t at = (uint64_t)chunk * s->geometry.chunk_params, end = at + s->chunks[chunk].length;
    if (s->chunks[chunk].averaged) return kernels_chosen()->finite(u->values + at, end - at);
    for (struct run run; next_unseen(u, at, end, &run); at = run.end)
        if (!kernels_chosen()->finite(u->values + run.first, run.end - run.first)) return false;
    return true;
}

/* A chunk before one that is refused is not looked at: the last one is the same whichever hand took it. */
static int look_at_taken(pyps_store *s, a32 *next, const void *what) {
    const struct looking *l = what;
    const struct unseen *u = &l->unseen;
    uint32_t count = s->geometry.chunks - u->first;
    for (uint32_t taken; (taken = next32_relaxed(next)) < count && !load32_acquire(l->refused);) {
        uint32_t chunk = s->geometry.chunks - 1 - taken;
        uint64_t at = (uint64_t)chunk * s->geometry.chunk_params;
        if (!chunk_is_finite(s, u, chunk)) max32(l->refused, chunk + 1);
        else if (l->to) memcpy(l->to + at, u->values + at, s->geometry.chunk_params * sizeof *l->to);
    }
    return PYPS_OK;
}

int finite_check(pyps_store *s, const struct unseen *unseen, float *to) {
    a32 refused = 0;
    struct looking looking = {*unseen, to, &refused};
    uint32_t *first = &looking.unseen.first;
    while (*first < s->geometry.chunks && chunk_is_seen(s, unseen, *first)) ++*first;
    crew_work(s, s->geometry.chunks - *first, look_at_taken, &looking);
    if (!refused) return PYPS_OK;
    uint64_t at = (uint64_t)(refused - 1) * s->geometry.chunk_params;
    return refuse(s, unseen->values + at, at, s->chunks[refused - 1].length);
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

int finite_check_halves(const pyps_store *s, uint32_t staging, uint32_t codec, const struct unseen *unseen) {
    for (uint32_t chunk = 0; chunk < s->geometry.chunks && !s->chunks[chunk].averaged; chunk++) {
        uint64_t at = (uint64_t)chunk * s->geometry.chunk_params, end = at + s->chunks[chunk].length;
        if (chunk_is_seen(s, unseen, chunk)) continue;
        for (uint64_t count; at < end; at += count) {
            float block[BLOCK];
            count = end - at < BLOCK ? end - at : BLOCK;
            int rc = check_run(s, staging_gradient(s, s->slot, staging, codec, at, count, block), at, count);
            if (rc) return rc;
        }
    }
    return PYPS_OK;
}

int pyps_finite(const float *values, uint64_t count) {
    int rc = count ? require(values) : PYPS_OK;
    if (rc || kernels_chosen()->finite(values, count)) return rc;
    while (isfinite(*values)) values++;
    return fail(PYPS_ENONFINITE, "finite: found %g", (double)*values);
}

int pyps_take(float *to, const float *from, uint64_t count) {
    const struct kernels *kernels = kernels_chosen();
    bool finite = true, streams = count >= STREAM_FROM;
    int rc = count ? require(to) : PYPS_OK;
    if (rc || (rc = count ? require(from) : PYPS_OK)) return rc;
    for (uint64_t at = 0, length; at < count; at += length) {
        length = count - at < PIECE ? count - at : PIECE;
        finite &= kernels->finite(from + at, length);
        if (streams) kernels->stream(to + at, from + at, length);
        else memcpy(to + at, from + at, length * sizeof *to);
    }
    if (streams) kernels->copied();
    return finite ? PYPS_OK : fail(PYPS_ENONFINITE, "take: found a value that is not finite");
}
