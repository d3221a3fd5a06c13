/* encoded.c: gradients that are sent encoded, and their residuals.
 *
 * The residual is what an encoder drops. It is kept and added to the next gradient of the same rank (error
 * feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019). Every worker's slot has room for
 * four residuals, of which two are in use as a rule. The view names the one that belongs to each rank, the one
 * that belonged to it at the version (before gradients that wait for their round), and the one that a snapshot
 * reads. An encode reads the first and writes one of its own slot that is none of them, and the event that
 * admits the push makes the view name the new one. So a push that is
 * refused, fails or dies has changed nothing, and a rank's next worker finds the residual whole, in any slot.
 * A new worker takes a slot whose residual is still needed only if no other is free; that residual is then
 * dropped and counted.
 */
#include <string.h>

#include "store/gradients.h"

/* Is this residual a rank's, or one that a snapshot reads? */
static bool residual_needed(pyps_store *s, const struct view *v, uint32_t name) {
    for (uint32_t r = 0, ranks = pinned_ranks(s, v); r < ranks; r++) {
        const struct rank *rank = pinned_rank(s, v, r);
        if (rank->residual == name || rank->version_residual == name ||
            (v->snapshot_active && rank->held_residual == name))
            return true;
    }
    return residual_has_reader(s, name); /* W2 of atomics.h; W1 pinned the view */
}

/* Which residual the rank's gradient starts from, and which one of this slot it may write: 0 if all are
 * needed. */
static int find_residuals(pyps_store *s, struct event *e) {
    uint64_t word;
    const struct view *v = view_pin(s, &word);
    if (!v) return PYPS_ECORRUPT;
    e->residual_before = *(const volatile uint32_t *)&pinned_rank(s, v, (uint32_t)s->rank)->residual;
    bool valid = e->residual_before <= RESIDUALS_A_SLOT * s->geometry.max_participants;
    e->residual = 0;
    for (uint32_t which = RESIDUALS_A_SLOT; valid && which-- > 0;) {
        uint32_t name = 1 + RESIDUALS_A_SLOT * s->slot + which;
        if (!residual_needed(s, v, name)) e->residual = name;
    }
    if (valid) store_snapshot_seen(s, v);
    view_unpin(s);
    return valid ? PYPS_OK : fail(PYPS_ECORRUPT, "the view is damaged");
}

/* A snapshot that needs memory that there is not, or whose reader is stopped, is cancelled. */
static int take_residuals(pyps_store *s, struct event *e) {
    uint64_t deadline = wait_deadline_after(SNAPSHOT_GRACE_SECONDS);
    for (;;) {
        int rc = find_residuals(s, e);
        if (rc) return rc;
        if (!e->residual) slots_release_dead(s);
        uint32_t bit = 1u << (e->residual - 1) % RESIDUALS_A_SLOT;
        if (e->residual && s->residuals_allocated & bit) return PYPS_OK;
        if (e->residual && (rc = residual_allocate(s, e->residual)) == PYPS_OK) {
            s->residuals_allocated |= bit;
            return PYPS_OK;
        }
        if (e->residual && (rc != PYPS_ENOSPC || !s->snapshot_active)) return rc;
        if (s->snapshot_active) rc = snapshot_end(s, EVENT_SNAPSHOT_CANCEL, s->snapshot);
        else if (wait_now_nanoseconds() >= deadline)
            rc = fail(PYPS_EFULL, "stopped processes read all residuals of slot %u", s->slot);
        else wait_on_word(&s->header->progress, load32_acquire(&s->header->progress), STALL_NANOSECONDS);
        if (rc && rc != PYPS_ENOSPC) return rc;
    }
}

/* Chunks begin at whole blocks. What is between a group's last parameter and the end of its chunk is always
 * coded as zeros. */
int chunk_encode(const pyps_store *s, uint32_t chunk, const float *values, struct encoding *flat) {
    struct encoding run = *flat;
    uint32_t codec = flat->codec;
    uint64_t length = s->chunks[chunk].length, whole = s->geometry.chunk_params;
    run.first = chunk * whole, run.values = values, run.count = length;
    run.codes += codec_codes(codec, run.first), run.scales += codec_scales(codec, run.first);
    if (run.residual) run.residual += run.first;
    if (run.residual_out) run.residual_out += run.first;
    run.found_nonfinite = run.skipped = 0;
    int rc = codec_encode(&run);
    flat->found_nonfinite += run.found_nonfinite, flat->skipped += run.skipped;
    uint64_t codes = codec_codes(codec, length), scales = codec_scales(codec, length);
    memset(run.codes + codes, codec == PYPS_NF4 ? NF4_ZERO : 0, codec_codes(codec, whole) - codes);
    memset(run.scales + scales, 0, (codec_scales(codec, whole) - scales) * sizeof *run.scales);
    return rc;
}

int staging_encode(pyps_store *s, const pyps_push_args *a, struct event *e, pyps_push_result *out) {
    struct encoding flat = {.codec = a->codec,
                            .stochastic = a->rounding == PYPS_STOCHASTIC,
                            .nonfinite = a->nonfinite,
                            .scale = a->scale,
                            .seed = a->seed,
                            .codes = staging_codes(s, s->slot, a->staging),
                            .scales = staging_scales(s, s->slot, a->staging, a->codec)};
    const float *values = a->gradient ? a->gradient : staging_data(s, s->slot, a->staging);
    int rc = a->error_feedback ? take_residuals(s, e) : PYPS_OK;
    if (rc) return rc;
    if (a->error_feedback) {
        flat.residual = e->residual_before ? residual_at(s, e->residual_before) : NULL;
        flat.residual_out = residual_at(s, e->residual);
    }
    for (uint32_t chunk = 0; chunk < s->geometry.chunks && !s->chunks[chunk].averaged && !rc; chunk++) {
        rc = chunk_encode(s, chunk, values + (uint64_t)chunk * s->geometry.chunk_params, &flat);
        FAILPOINT("push.encoding");
    }
    if (a->gradient)
        memcpy(staging_data(s, s->slot, a->staging) + s->trained, a->gradient + s->trained,
               4 * (store_elements(s) - s->trained));
    out->nonfinite = flat.found_nonfinite, out->blocks_skipped = flat.skipped;
    return rc;
}
