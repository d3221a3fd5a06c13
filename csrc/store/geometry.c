/* geometry.c: turns a creator's configuration, checked field by field, into geometry, tensors and groups. */
#include <stdlib.h>
#include <string.h>

#include "store/segment.h"

static uint32_t or_default(uint32_t value, uint32_t instead) { return value ? value : instead; }

static int check_tensor(const pyps_config *config, uint32_t index, pyps_tensor *t) {
    if (!memchr(t->name, 0, sizeof t->name) || !t->name[0])
        return fail(PYPS_EINVAL, "tensor %u: name: expected 1 to %zu bytes", index, sizeof t->name - 1);
    if (t->dtype != PYPS_F32)
        return fail(PYPS_EINVAL, "tensor %s: dtype: found %u; expected PYPS_F32", t->name, t->dtype);
    if (t->group >= config->groups)
        return fail(PYPS_EINVAL, "tensor %s: group: found %u; expected below %u", t->name, t->group,
                    config->groups);
    if (t->ndim > 8)
        return fail(PYPS_EINVAL, "tensor %s: ndim: found %u; expected at most 8", t->name, t->ndim);
    if (t->kind > PYPS_AVERAGED)
        return fail(PYPS_EINVAL, "tensor %s: kind: found %u; expected PYPS_TRAINED or PYPS_AVERAGED", t->name,
                    t->kind);
    t->elements = 1;
    for (uint32_t d = 0; d < t->ndim; d++)
        if (__builtin_mul_overflow(t->elements, t->shape[d], &t->elements) || t->elements > UINT64_C(1) << 44)
            return fail(PYPS_EINVAL, "tensor %s: shape: more than 2^44 elements", t->name);
    return PYPS_OK;
}

static int by_name(const void *a, const void *b) {
    return strcmp((*(const pyps_tensor *const *)a)->name, (*(const pyps_tensor *const *)b)->name);
}

static int check_names(const pyps_tensor *tensors, uint32_t count) {
    const pyps_tensor **sorted = malloc(count * sizeof *sorted);
    int rc = sorted ? PYPS_OK : fail(PYPS_ENOSPC, "out of memory for %u tensors", count);
    for (uint32_t t = 0; sorted && t < count; t++) sorted[t] = &tensors[t];
    if (sorted) qsort(sorted, count, sizeof *sorted, by_name);
    for (uint32_t t = 1; !rc && t < count; t++)
        if (!strcmp(sorted[t - 1]->name, sorted[t]->name))
            rc = fail(PYPS_EINVAL, "tensor %s: found twice; expected unique names", sorted[t]->name);
    free(sorted);
    return rc;
}

/* A group has the kind of its tensors; one without any has that of the group before it. */
static int find_kinds(const struct geometry *g, const pyps_tensor *tensors, struct group *groups) {
    for (uint32_t i = 0; i < g->groups; i++) {
        const pyps_tensor *first = NULL;
        groups[i].kind = i ? groups[i - 1].kind : PYPS_TRAINED;
        for (uint32_t t = 0; t < g->tensors; t++) {
            if (tensors[t].group != i) continue;
            if (!first && tensors[t].kind < groups[i].kind)
                return fail(PYPS_EINVAL,
                            "tensor %s: group: found %u, after an averaged one; expected averaged "
                            "groups to be the last ones",
                            tensors[t].name, i);
            if (!first) first = &tensors[t], groups[i].kind = first->kind;
            if (tensors[t].kind != first->kind)
                return fail(PYPS_EINVAL, "tensor %s: kind: found %u; expected %u, as %s in group %u",
                            tensors[t].name, tensors[t].kind, first->kind, first->name, i);
        }
    }
    return PYPS_OK;
}

/* Groups follow one another, each from the start of a chunk. Tensors of a group are packed in given order. */
static int place(struct geometry *g, pyps_tensor *tensors, struct group *groups) {
    uint64_t chunk = 0;
    int rc = find_kinds(g, tensors, groups);
    if (rc) return rc;
    for (uint32_t i = 0; i < g->groups; i++) {
        groups[i].first_chunk = (uint32_t)chunk;
        for (uint32_t t = 0; t < g->tensors; t++) {
            if (tensors[t].group != i) continue;
            tensors[t].offset = chunk * g->chunk_params + groups[i].elements;
            groups[i].elements += tensors[t].elements;
        }
        uint64_t chunks = (groups[i].elements + g->chunk_params - 1) / g->chunk_params;
        groups[i].chunks = (uint32_t)chunks;
        if ((chunk += chunks) > UINT32_MAX / 2)
            return fail(PYPS_EINVAL, "chunk_params: %u is too small", g->chunk_params);
    }
    g->chunks = (uint32_t)chunk;
    g->averaged = groups[g->groups - 1].kind == PYPS_AVERAGED;
    return chunk ? PYPS_OK : fail(PYPS_EINVAL, "tensors: all are empty");
}

static int check(const pyps_config *c) {
    if (!c->tensors || !c->tensor || c->tensors > 1u << 20)
        return fail(PYPS_EINVAL, "tensors: found %u; expected 1 to 2^20", c->tensors);
    if (!c->groups || c->groups > 4096)
        return fail(PYPS_EINVAL, "groups: found %u; expected 1 to 4096", c->groups);
    return config_check_ranks(c);
}

int geometry_from_config(const pyps_config *given, struct geometry *g, pyps_tensor **tensors,
                         struct group **groups) {
    pyps_config config;
    const pyps_config *c = &config;
    int rc = config_read(given, &config);
    if (rc || (rc = check(c))) return rc;
    *g = (struct geometry){.chunk_params = or_default(c->chunk_params, 32768),
                           .max_participants = or_default(c->max_participants, 64),
                           .staging_buffers = or_default(c->staging_buffers, 2),
                           .optimizer = c->optimizer,
                           .policy = c->policy,
                           .ranks = c->ranks,
                           .groups = c->groups,
                           .tensors = c->tensors,
                           .samples = c->samples ? c->samples : UINT64_MAX,
                           .round_timeout_nanoseconds = config_round_timeout(c),
                           .policy_params = c->policy_params,
                           .plan = c->plan,
                           .seed = c->seed,
                           .rounding_seed = c->seed,
                           .master = c->master};
    *tensors = malloc(c->tensors * sizeof **tensors);
    *groups = calloc(c->groups, sizeof **groups);
    if (!*tensors || !*groups) rc = fail(PYPS_ENOSPC, "out of memory for %u tensors", c->tensors);
    for (uint32_t t = 0; t < c->tensors && !rc; t++) {
        (*tensors)[t] = c->tensor[t];
        rc = check_tensor(c, t, &(*tensors)[t]);
    }
    if (!rc) rc = check_names(*tensors, c->tensors);
    if (!rc) rc = place(g, *tensors, *groups);
    if (rc) free(*tensors), free(*groups);
    g->snapshot_spares = or_default(c->snapshot_spares, g->chunks < 64 ? g->chunks : 64);
    return rc;
}

uint32_t geometry_checksum(const struct geometry *g, const pyps_tensor *tensors, const struct group *groups) {
    uint32_t crc = layout_crc32(g, sizeof *g, 0);
    crc = layout_crc32(tensors, g->tensors * sizeof *tensors, crc);
    return layout_crc32(groups, g->groups * sizeof *groups, crc);
}

int geometry_tables_valid(const struct geometry *g, const pyps_tensor *tensors, const struct group *groups) {
    uint64_t chunk = 0, flat = (uint64_t)g->chunks * g->chunk_params;
    for (uint32_t i = 0; i < g->groups; i++) {
        if (groups[i].first_chunk != chunk ||
            groups[i].elements > (uint64_t)groups[i].chunks * g->chunk_params)
            return 0;
        if (groups[i].chunks && groups[i].elements <= (uint64_t)(groups[i].chunks - 1) * g->chunk_params)
            return 0;
        if (groups[i].kind > PYPS_AVERAGED || (i && groups[i].kind < groups[i - 1].kind)) return 0;
        chunk += groups[i].chunks;
    }
    if (g->averaged != (groups[g->groups - 1].kind == PYPS_AVERAGED)) return 0;
    for (uint32_t t = 0; t < g->tensors; t++)
        if (tensors[t].ndim > 8 || tensors[t].offset > flat ||
            tensors[t].elements > flat - tensors[t].offset ||
            !memchr(tensors[t].name, 0, sizeof tensors[t].name))
            return 0;
    return chunk == g->chunks;
}
