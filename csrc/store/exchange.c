/* exchange.c: a push and the pull after it in one pass. New parameters go to the worker's copy while they are
 * in cache; only chunks that others applied are read again. */
#include <string.h>

#include "store/store.h"

/* Chunks that this handle brought to the exchange's ticket were copied on the way (apply.c). */
static int copy_others(pyps_store *s, float *flat, uint64_t ticket, uint64_t *version_out) {
    uint64_t word, oldest = UINT64_MAX;
    for (uint32_t chunk = 0; chunk < s->geometry.chunks; chunk++) {
        uint64_t version = ticket;
        if (!ticket || s->streamed[chunk] != ticket) {
            int rc = chunk_pin(s, chunk, &word);
            if (rc) return rc;
            chunk_look(s, chunk, word_buffer(word), flat);
            FAILPOINT("exchange.copied");
            chunk_unpin(s);
            version = word_version(word);
        }
        if (version < oldest) oldest = version;
    }
    *version_out = oldest;
    return PYPS_OK;
}

int pyps_exchange(pyps_store *s, const pyps_push_args *args, float *flat, pyps_push_result *out,
                  uint64_t *version_out) {
    int rc = store_check_usable(s, true);
    if (rc || (rc = given(flat)) || (rc = given(out)) || (rc = given(version_out))) return rc;
    memset(s->streamed, 0, s->geometry.chunks * sizeof *s->streamed);
    s->stream_to = (uintptr_t)flat % 16 ? NULL : flat, s->stream_ticket = 0;
    rc = pyps_push(s, args, out);
    s->stream_to = NULL;
    if (!rc) rc = lookahead_set(s);
    if (!rc) rc = copy_others(s, flat, out->version, version_out);
    kernels_chosen()->copied();
    if (rc) return rc;
    activity_pulled(s, activity_bytes(s, PYPS_F32));
    /* If the worker was fenced since then, the next call reports it: this push was admitted. */
    rc = pull_record(s, *version_out);
    return rc == PYPS_EFENCED ? PYPS_OK : rc;
}
