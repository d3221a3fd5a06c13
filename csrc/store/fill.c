/* fill.c: what a push writes into its staging buffer: all that apply reads. */
#include <string.h>

#include "store/push.h"

#define SKETCHED (32u * BLOCK) /* values, of which a sketch is made */

static int check(const pyps_store *s, const pyps_push_args *a) {
    if (a->codec >= CODECS)
        return fail(PYPS_EINVAL, "push: codec: found %u; expected PYPS_F32 to PYPS_NF4", a->codec);
    if (a->codec == PYPS_F32 && (a->error_feedback || a->encoded))
        return fail(PYPS_EINVAL,
                    "push: codec: found PYPS_F32; expected another codec with error_feedback or encoded");
    if (a->encoded && (a->error_feedback || a->gradient))
        return fail(PYPS_EINVAL, "push: encoded: found with error_feedback or gradient; expected neither: "
                                 "the codes are in the buffer");
    if (a->ranges && a->codec != PYPS_F32)
        return fail(PYPS_EINVAL, "push: codec: found %u with ranges; expected PYPS_F32", a->codec);
    if (a->ranges || a->range_count) {
        int rc = require(a->ranges);
        if (rc || (rc = ranges_check(s, "push", a->ranges, a->range_count))) return rc;
    }
    if (a->looked || a->looked_count) {
        int rc = require(a->looked);
        if (rc || (rc = ranges_check(s, "push: looked", a->looked, a->looked_count))) return rc;
    }
    pyps_encode_args encode = {.size = sizeof encode,
                               .codec = a->codec,
                               .rounding = a->rounding,
                               .nonfinite = a->nonfinite,
                               .scale = a->scale};
    return codec_check_args("push", &encode);
}

/* Nothing is written before all of it is found to be finite, so a refused gradient in the buffer is still there. */
static int fill_ranges(pyps_store *s, const pyps_push_args *a) {
    float *data = staging_data(s, s->slot, a->staging);
    bool packed = a->gradient != NULL;
    int rc = packed ? PYPS_OK : ranges_place(s, data, NULL, a->ranges, a->range_count);
    if (!rc && a->nonfinite == PYPS_NONFINITE_ERROR)
        rc = finite_check_ranges(s, packed ? a->gradient : data, packed, a->ranges, a->range_count);
    if (!rc && packed) rc = ranges_place(s, data, a->gradient, a->ranges, a->range_count);
    return rc;
}

static int fill_codes(pyps_store *s, const pyps_push_args *a, struct event *e, pyps_push_result *out) {
    uint64_t scales = codec_scales(a->codec, s->trained);
    int rc = staging_allocate_codes(s, a->staging, pyps_encoded_bytes(a->codec, s->trained));
    if (rc || (rc = staging_allocate_averaged(s, a->staging))) return rc;
    if (!a->encoded) {
        if (!a->gradient && (rc = staging_allocate(s, a->staging))) return rc;
        staging_header(s, s->slot, a->staging)->scale = 1.0f; /* the codes hold the scaled gradient */
        return staging_encode(s, a, e, out);
    }
    if (!codec_scales_finite(staging_scales(s, s->slot, a->staging, a->codec), scales))
        return fail(PYPS_ENONFINITE, "push: staging %u: found a scale that is not finite", a->staging);
    const struct unseen unseen = {.looked = a->looked, .looked_count = a->looked_count};
    return scales ? PYPS_OK : finite_check_halves(s, a->staging, a->codec, &unseen);
}

static int fill_floats(pyps_store *s, const pyps_push_args *a) {
    float *data = staging_data(s, s->slot, a->staging);
    int rc = staging_allocate(s, a->staging);
    if (rc || !a->gradient) return rc;
    if (a->nonfinite == PYPS_NONFINITE_ERROR)
        return finite_check(s, &(struct unseen){.values = a->gradient}, data);
    memcpy(data, a->gradient, 4 * store_elements(s));
    return PYPS_OK;
}

static bool clips_norm(const pyps_store *s, const pyps_push_args *a) {
    bool clips = false;
    for (uint32_t group = 0; group < s->geometry.groups; group++) clips |= a->hyper[group].clip_norm > 0;
    return clips;
}

/* Whether what the caller has looked at need not be looked at again. Its push is there to be told when it was wrong. */
static bool is_looked(const pyps_store *s, const pyps_push_args *a) {
    bool sums = !s->policy->stages && clips_norm(s, a); /* and so sees what is not finite */
    bool waits = s->policy->waits_for_round || !s->policy->stages;
    return a->looked_count && a->codec == PYPS_F32 && a->nonfinite == PYPS_NONFINITE_ERROR && !a->gradient &&
           !a->ranges && waits && !sums;
}

/* What was said of averaged tensors is left out: their steps do not notice. */
static struct unseen unseen_of(const pyps_store *s, const pyps_push_args *a, bool finite) {
    struct unseen u = {.values = staging_data(s, s->slot, a->staging)};
    if (finite || a->codec != PYPS_F32) u.first = (uint32_t)(s->trained / s->geometry.chunk_params);
    else if (is_looked(s, a)) u.looked = a->looked, u.looked_count = a->looked_count;
    return u;
}

/* Sums the gradient's norm, if it is to be clipped, and finds whether what lies in the buffer is finite: all of it, or
 * averaged tensors alone where an encoder or the norm has looked at the rest. */
static int finish_fill(pyps_store *s, const pyps_push_args *a) {
    bool finite = false, checked = a->ranges || (a->codec == PYPS_F32 && a->gradient);
    if (s->policy->stages) norm_reset(s, a->staging);
    else if (clips_norm(s, a)) norm_of_push(s, a->staging, &finite);
    if (checked || a->nonfinite != PYPS_NONFINITE_ERROR) return PYPS_OK;
    const struct unseen unseen = unseen_of(s, a, finite);
    return finite_check(s, &unseen, NULL);
}

/* Of the gradient as it will be applied, in blocks that are spread over all of it: at most SKETCHED values. */
static void sketch(const pyps_store *s, const pyps_push_args *a, struct event *e) {
    uint32_t codec = staging_codec(s, s->slot, a->staging), size = s->geometry.chunk_params;
    uint32_t length = size < BLOCK ? size : BLOCK, in_chunk = size / length;
    uint64_t all = s->trained / length, step = all > SKETCHED / BLOCK ? all * BLOCK / SKETCHED : 1;
    for (uint64_t i = 0; i < all; i += step) {
        uint32_t chunk = (uint32_t)(i / in_chunk), from = (uint32_t)(i % in_chunk) * length;
        uint32_t used = s->chunks[chunk].length, count = used < from + length ? used - from : length;
        uint64_t at = (uint64_t)chunk * size + from;
        float block[BLOCK];
        if (used > from)
            sketch_add(e->sketch, staging_gradient(s, s->slot, a->staging, codec, at, count, block), at,
                       count);
    }
    float scale = staging_header(s, s->slot, a->staging)->scale;
    for (uint32_t i = 0; i < SKETCH; i++) e->sketch[i] *= scale;
    e->sketched = 1;
}

static uint32_t form(const pyps_store *s, const pyps_push_args *a) {
    if (is_looked(s, a)) return STAGED_LOOKED;
    if (a->codec != PYPS_F32 || a->nonfinite == PYPS_NONFINITE_ERROR) return a->codec;
    return a->nonfinite == PYPS_NONFINITE_ZERO ? STAGED_ZERO : STAGED_SKIP;
}

int staging_fill(pyps_store *s, const pyps_push_args *a, struct event *e, pyps_push_result *out) {
    struct staging_header *header = staging_header(s, s->slot, a->staging);
    int rc = check(s, a);
    if (rc) return rc;
    header->codec = form(s, a), header->scale = a->scale, header->samples = a->samples;
    header->position = a->position, header->weight = a->weighted ? a->weight : (double)a->samples;
    store32_release(&header->false_look, 0); /* no other participant reads it before admission */
    memcpy(header->hyper, a->hyper, s->geometry.groups * sizeof *a->hyper);
    if (!a->samples) return PYPS_OK; /* the step is skipped: the gradient is not read */
    if ((rc = ranges_stage(s, a->staging, a->ranges, a->range_count))) return rc;
    if (a->codec != PYPS_F32) rc = fill_codes(s, a, e, out);
    else rc = a->ranges ? fill_ranges(s, a) : fill_floats(s, a);
    if (rc || (rc = finish_fill(s, a))) return rc;
    if (s->looks_at_gradients && !a->ranges) sketch(s, a, e);
    return PYPS_OK;
}
