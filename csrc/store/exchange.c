/* exchange.c: a push and the pull after it in one pass. New parameters go to the worker's copy while they are
 * in cache, by the thread that applies the chunk (apply.c); only chunks that other participants applied are read again. */
#include "store/pull.h"

static int exchange(pyps_store *s, const pyps_push_args *args, float *flat, pyps_push_result *out,
                    uint64_t *version_out) {
    s->stream.to = (uintptr_t)flat % 16 ? NULL : flat, s->stream.ticket = 0;
    int rc = pyps_push(s, args, out);
    s->stream.to = NULL;
    if (!rc) rc = lookahead_set(s);
    kernels_chosen()->copied();
    return rc ? rc : chunks_copy(s, flat, out->version, version_out);
}

int pyps_exchange(pyps_store *s, const pyps_push_args *args, float *flat, pyps_push_result *out,
                  uint64_t *version_out) {
    return pyps_exchange_arriving(s, args, flat, 0, NULL, NULL, out, version_out);
}

int pyps_exchange_arriving(pyps_store *s, const pyps_push_args *args, float *flat, uint64_t least,
                           pyps_arrival arrived, void *context, pyps_push_result *out,
                           uint64_t *version_out) {
    int rc = store_check_usable(s, true);
    if (rc || (rc = require(flat)) || (rc = require(out)) || (rc = require(version_out))) return rc;
    struct arrivals arrivals = {.arrived = arrived, .context = context, .least = least};
    arrivals_begin(s, &arrivals);
    rc = exchange(s, args, flat, out, version_out);
    int refused = arrivals_end(s, !rc);
    if (rc) return rc;
    activity_pulled(s, activity_bytes(s, PYPS_F32));
    /* If the worker was fenced since then, the next call reports it: this push was admitted. */
    rc = pull_record(s, *version_out);
    return rc == PYPS_EFENCED || !rc ? refused : rc;
}
