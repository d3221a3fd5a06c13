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
#include <math.h>
#include <math.h>
#include <string.h>

#include "store/store.h"

static uint8_t *codes_of(const pyps_store *s, uint32_t slot, uint32_t staging) {
    return (uint8_t *)(void *)staging_header(s, slot, staging) + s->layout.staging_codes;
}

static float *scales_of(const pyps_store *s, uint32_t slot, uint32_t staging, uint32_t codec) {
    return (float *)(void *)(codes_of(s, slot, staging) + codec_codes(codec, s->trained));
}

float *residual_at(const pyps_store *s, uint32_t name) {
    return (float *)(void *)(s->base + s->layout.residuals + (name - 1) * s->layout.residual_stride);
}

/* Read once from shared memory, where a hostile owner may change it. */
uint32_t staging_codec(const pyps_store *s, uint32_t slot, uint32_t staging) {
    uint32_t codec = *(volatile uint32_t *)&staging_header(s, slot, staging)->codec;
    return codec < CODECS ? codec : PYPS_F32;
}

const float *staging_gradient(const pyps_store *s, uint32_t slot, uint32_t staging, uint32_t codec,
                              uint64_t at, size_t length, float *block) {
    if (codec == PYPS_F32) return staging_data(s, slot, staging) + at;
    kernels_chosen()->decode(codec, block, codes_of(s, slot, staging) + codec_codes(codec, at),
                             scales_of(s, slot, staging, codec) + codec_scales(codec, at), length);
    return block;
}

static int allocate_codes(pyps_store *s, uint32_t staging) {
    if (s->codes_allocated & 1u << staging) return PYPS_OK;
    uint64_t offset = (uint64_t)(codes_of(s, s->slot, staging) - s->base);
    int rc = segment_allocate(s, offset, s->layout.staging_base_params - s->layout.staging_codes);
    if (!rc) s->codes_allocated |= 1u << staging;
    return rc;
}

int residual_allocate(pyps_store *s, uint32_t name) {
    return segment_allocate(s, s->layout.residuals + (name - 1) * s->layout.residual_stride,
                            s->layout.residual_stride);
}

void *pyps_staging_codes(pyps_store *s, uint32_t staging) {
    return staging_check(s, staging) || allocate_codes(s, staging) ? NULL : codes_of(s, s->slot, staging);
}

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
        if (s->snapshot_active) rc = snapshot_cancel(s, s->snapshot);
        else if (wait_now_nanoseconds() >= deadline)
            rc = fail(PYPS_EFULL, "stopped processes read all residuals of slot %u", s->slot);
        else wait_on_word(&s->header->progress, load32_acquire(&s->header->progress), STALL_NANOSECONDS);
        if (rc && rc != PYPS_ENOSPC) return rc;
    }
}

static int check(const pyps_store *s, const pyps_push_args *a) {
    if (a->codec >= CODECS)
        return fail(PYPS_EINVAL, "push: codec: found %u; expected PYPS_F32 to PYPS_NF4", a->codec);
    if (s->needs.needs_base_params && !a->base_params && a->samples)
        return fail(PYPS_EINVAL,
                    "push: base_params: found NULL; the policy %s needs the parameters that the "
                    "gradient was computed on",
                    s->policy->name);
    if (a->codec == PYPS_F32 && (a->error_feedback || a->encoded))
        return fail(PYPS_EINVAL,
                    "push: codec: found PYPS_F32; expected another codec with error_feedback or encoded");
    if (a->encoded && (a->error_feedback || a->gradient))
        return fail(PYPS_EINVAL, "push: encoded: found with error_feedback or gradient; expected neither: "
                                 "the codes are in the buffer");
    pyps_encode_args encode = {.size = sizeof encode,
                               .codec = a->codec,
                               .rounding = a->rounding,
                               .nonfinite = a->nonfinite,
                               .scale = a->scale};
    return codec_check_args("push", &encode);
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

static int encode_staging(pyps_store *s, const pyps_push_args *a, const struct event *e,
                          pyps_push_result *out) {
    struct encoding flat = {.codec = a->codec,
                            .stochastic = a->rounding == PYPS_STOCHASTIC,
                            .nonfinite = a->nonfinite,
                            .scale = a->scale,
                            .seed = a->seed,
                            .codes = codes_of(s, s->slot, a->staging),
                            .scales = scales_of(s, s->slot, a->staging, a->codec)};
    const float *values = a->gradient ? a->gradient : staging_data(s, s->slot, a->staging);
    if (a->error_feedback) {
        flat.residual = e->residual_before ? residual_at(s, e->residual_before) : NULL;
        flat.residual_out = residual_at(s, e->residual);
    }
    int rc = PYPS_OK;
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

static int stage_base_params(pyps_store *s, const pyps_push_args *a) {
    float *to = staging_base_params(s, s->slot, a->staging);
    if (!(s->base_params_allocated & 1u << a->staging)) {
        int rc = segment_allocate(s, (uint64_t)((uint8_t *)to - s->base), 4 * store_elements(s));
        if (rc) return rc;
        s->base_params_allocated |= 1u << a->staging;
    }
    memcpy(to, a->base_params, 4 * store_elements(s));
    return PYPS_OK;
}

static int refuse_value(const pyps_store *s, const float *values, uint64_t at, uint32_t length) {
    const pyps_tensor *tensor = (const pyps_tensor *)(const void *)(s->base + s->layout.tensors);
    for (uint32_t i = 1; i < length && isfinite(values[at]); i++) at++;
    uint32_t t = 0;
    while (t + 1 < s->geometry.tensors && at - tensor[t].offset >= tensor[t].elements) t++;
    return fail(PYPS_ENONFINITE, "push: the gradient of '%.159s' has a value that is not finite (%g)",
                tensor[t].name, (double)values[at]);
}

static int check_finite(const pyps_store *s, const float *values) {
    for (uint32_t chunk = 0; chunk < s->geometry.chunks && !s->chunks[chunk].averaged; chunk++) {
        uint64_t at = (uint64_t)chunk * s->geometry.chunk_params;
        if (!kernels_chosen()->finite(values + at, s->chunks[chunk].length))
            return refuse_value(s, values, at, s->chunks[chunk].length);
    }
    return PYPS_OK;
}

static int fill_gradient(pyps_store *s, const pyps_push_args *a, struct event *e, pyps_push_result *out) {
    int rc;
    if (a->codec == PYPS_F32) {
        const float *values = a->gradient ? a->gradient : staging_data(s, s->slot, a->staging);
        if (a->nonfinite == PYPS_NONFINITE_ERROR && (rc = check_finite(s, values))) return rc;
        if (a->gradient) memcpy(staging_data(s, s->slot, a->staging), a->gradient, 4 * store_elements(s));
        return PYPS_OK;
    }
    if ((rc = allocate_codes(s, a->staging))) return rc;
    if (a->encoded) {
        uint64_t scales = codec_scales(a->codec, s->trained);
        return codec_scales_finite(scales_of(s, s->slot, a->staging, a->codec), scales)
                   ? PYPS_OK
                   : fail(PYPS_ENONFINITE, "push: staging %u: found a scale that is not finite", a->staging);
    }
    if (a->error_feedback && (rc = take_residuals(s, e))) return rc;
    staging_header(s, s->slot, a->staging)->scale = 1.0f; /* the codes hold the scaled gradient */
    return encode_staging(s, a, e, out);
}

int staging_fill(pyps_store *s, const pyps_push_args *a, struct event *e, pyps_push_result *out) {
    struct staging_header *header = staging_header(s, s->slot, a->staging);
    int rc = check(s, a);
    if (rc) return rc;
    header->codec = a->codec, header->scale = a->scale, header->samples = a->samples;
    header->position = a->position;
    memcpy(header->hyper, a->hyper, s->geometry.groups * sizeof *a->hyper);
    header->compensation = s->needs.needs_base_params ? (float)s->geometry.policy_params.lambda_ : 0;
    if (!a->samples) return PYPS_OK; /* the step is skipped: the gradient is not read */
    if (header->compensation > 0 && (rc = stage_base_params(s, a))) return rc;
    if ((rc = fill_gradient(s, a, e, out))) return rc;
    if (s->policy->stages) norm_reset(s, a->staging);
    else norm_of_push(s, a->staging);
    return PYPS_OK;
}
