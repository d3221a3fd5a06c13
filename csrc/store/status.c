/* status.c: observing and steering: the view in the public structs, and re-planning. */
#include <stdlib.h>
#include <string.h>

#include "store/stores.h"

int pyps_get_layout(pyps_store *s, pyps_layout *out) {
    int rc = store_check_usable(s, false);
    if (rc || (rc = require(out))) return rc;
    const struct geometry *g = &s->geometry;
    *out = (pyps_layout){.segment_bytes = s->layout.bytes,
                         .flat_elements = (uint64_t)g->chunks * g->chunk_params,
                         .chunks = g->chunks,
                         .chunk_params = g->chunk_params,
                         .max_participants = g->max_participants,
                         .staging_buffers = g->staging_buffers,
                         .groups = g->groups,
                         .tensors = g->tensors,
                         .ranks = g->ranks,
                         .optimizer = g->optimizer,
                         .policy = g->policy,
                         .states = s->layout.states,
                         .master = g->master,
                         .averaged_elements = store_elements(s) - s->trained,
                         .samples = g->samples == UINT64_MAX ? 0 : g->samples,
                         .plan = g->plan,
                         .seed = g->seed};
    for (uint32_t c = 0; c < g->chunks; c++) out->parameters += s->chunks[c].length;
    return PYPS_OK;
}

int pyps_get_policy_params(pyps_store *s, pyps_policy_params *out) {
    int rc = store_check_usable(s, false);
    if (!rc) rc = require(out);
    if (!rc) *out = s->geometry.policy_params;
    return rc;
}

int pyps_get_tensor(pyps_store *s, uint32_t index, pyps_tensor *out) {
    int rc = store_check_usable(s, false);
    if (rc || (rc = require(out))) return rc;
    if (index >= s->geometry.tensors)
        return fail(PYPS_EINVAL, "tensor: found %u; expected below %u", index, s->geometry.tensors);
    *out = s->tensors[index];
    return PYPS_OK;
}

/* A checked private copy of the present view; the caller frees it. */
static int copy_view(pyps_store *s, struct view **out) {
    int rc = store_check_usable(s, false);
    if (rc) return rc;
    if (!(*out = view_allocate(s))) return PYPS_ENOSPC;
    if ((rc = view_observe(s, *out))) free(*out);
    return rc;
}

int pyps_get_status(pyps_store *s, pyps_status *out) {
    struct view head, *v = &head;
    int rc = store_check_usable(s, false);
    if (rc || (rc = require(out))) return rc;
    bool whole = s->policy->report; /* of a policy's own words; else a short look is enough */
    if ((rc = whole ? copy_view(s, &v) : view_observe_head(s, v))) return rc;
    *out = (pyps_status){.sequence = v->sequence,
                         .version = v->version,
                         .round = v->round,
                         .plan = v->plan,
                         .samples_assigned = v->cursor,
                         .samples_dropped = v->samples_dropped,
                         .active = v->active,
                         .all_joined = v->all_joined,
                         .turn_rank = -1,
                         .ranks = v->ranks};
    if (!whole) return PYPS_OK;
    s->policy->report(v, out);
    free(v);
    return PYPS_OK;
}

int pyps_get_members(pyps_store *s, pyps_member *out, uint32_t capacity, uint32_t *count_out) {
    struct view *v;
    int rc = require(count_out);
    if (!rc && capacity) rc = require(out);
    if (rc || (rc = copy_view(s, &v))) return rc;
    *count_out = 0;
    for (uint32_t slot = 0; slot < v->participants && *count_out < capacity; slot++) {
        const struct member *m = view_member(v, slot);
        if (!m->id) continue;
        out[(*count_out)++] = (pyps_member){.id = m->id,
                                            .state = m->state,
                                            .role = m->role,
                                            .rank = m->rank,
                                            .pid = m->pid,
                                            .clock = m->clock,
                                            .pulled_version = m->pulled_version,
                                            .claim_first = m->claim_first,
                                            .claim_count = m->claim_count,
                                            .staged = m->staged != 0};
        pyps_member *shown = &out[*count_out - 1];
        if (m->rank >= 0 && (uint32_t)m->rank < v->ranks)
            shown->step_seconds = view_rank(v, (uint32_t)m->rank)->step_seconds;
        activity_show(s, slot, m, shown);
    }
    free(v);
    return PYPS_OK;
}

int pyps_get_ranks(pyps_store *s, pyps_rank *out, uint32_t capacity) {
    struct view *v;
    int rc = capacity ? require(out) : PYPS_OK;
    if (rc || (rc = copy_view(s, &v))) return rc;
    for (uint32_t rank = 0; rank < v->ranks && rank < capacity; rank++) out[rank] = view_rank(v, rank)->total;
    free(v);
    return PYPS_OK;
}

/* A chunk's buffer has the constants of the step that it came from. As in view_observe: a word that is the same
 * after the copy still named the buffer. */
__attribute__((no_sanitize("thread"))) static int hyper_of_chunk(pyps_store *s, uint32_t chunk,
                                                                 pyps_hyper *out) {
    for (;;) {
        uint64_t word = load_seq(&s->words[chunk]);
        if (word_buffer(word) >= s->layout.buffer_count)
            return fail(PYPS_ECORRUPT, "chunk %u: found buffer %u; the segment has %u", chunk,
                        word_buffer(word), s->layout.buffer_count);
        const a32 *from = (const a32 *)(const void *)&buffer_header(s, word_buffer(word))->hyper;
        for (size_t i = 0; i < sizeof *out / sizeof *from; i++) {
            uint32_t part = atomic_load_explicit(&from[i], memory_order_acquire);
            memcpy((char *)out + i * sizeof part, &part, sizeof part);
        }
        if (load_seq(&s->words[chunk]) == word) return PYPS_OK;
    }
}

static int hyper_of_group(pyps_store *s, uint32_t group, pyps_hyper *out) {
    *out = (pyps_hyper){0};
    for (uint32_t chunk = 0; chunk < s->geometry.chunks; chunk++)
        if (s->chunks[chunk].group == group) return hyper_of_chunk(s, chunk, out);
    return PYPS_OK;
}

int pyps_get_hyper(pyps_store *s, pyps_hyper *out, uint32_t capacity) {
    int rc = store_check_usable(s, false);
    if (!rc) rc = require(out);
    for (uint32_t group = 0; group < s->geometry.groups && group < capacity && !rc; group++)
        rc = hyper_of_group(s, group, &out[group]);
    return rc;
}

int pyps_get_costs(pyps_store *s, pyps_rank_cost *out, uint32_t capacity) {
    struct view *v;
    int rc = capacity ? require(out) : PYPS_OK;
    if (rc || (rc = copy_view(s, &v))) return rc;
    for (uint32_t rank = 0; rank < v->ranks && rank < capacity; rank++)
        out[rank] = view_cost(view_rank(v, rank));
    free(v);
    return PYPS_OK;
}

int pyps_replan(pyps_store *s, const uint32_t *batches, uint32_t count, uint64_t plan) {
    int rc = store_check_usable(s, true);
    if (rc) return rc;
    if (!batches || count < s->geometry.ranks || count > s->geometry.max_participants)
        return fail(PYPS_EINVAL, "batches: found %u; expected one for each of %u ranks", batches ? count : 0,
                    s->geometry.ranks);
    if ((rc = config_check_batches(batches, count))) return rc;
    struct event e = store_event(s, EVENT_REPLAN);
    e.batches = batches, e.count = count, e.plan_plus_1 = plan + 1;
    return view_commit_only(s, &e);
}

int pyps_set_schedule(pyps_store *s, const pyps_turn *turns, uint32_t count, double period_seconds) {
    int rc = store_check_usable(s, true);
    if (rc) return rc;
    /* A store may have more ranks than it was made with: the event knows how many. */
    bool grown = count > s->geometry.ranks && count <= s->geometry.max_participants;
    if ((rc = config_check_turns(turns, count, grown ? count : s->geometry.ranks, period_seconds))) return rc;
    struct event e = store_event(s, EVENT_SCHEDULE);
    e.turns = turns, e.count = count, e.period_seconds = period_seconds;
    return view_commit_only(s, &e);
}

int pyps_wait(pyps_store *s, uint64_t sequence, double timeout_seconds) {
    int rc = store_check_usable(s, false);
    if (rc) return rc;
    uint64_t deadline = wait_deadline_after(timeout_seconds < 0 ? 3600 : timeout_seconds);
    for (;;) {
        uint32_t seen = view_sequence_word(s);
        if (word_version(load_acquire(&s->header->view)) > sequence) return PYPS_OK;
        uint64_t now = wait_now_nanoseconds();
        if (now >= deadline) return fail(PYPS_ETIMEDOUT, "no event after view %lu", sequence);
        view_wait(s, seen, deadline - now < WAIT_SLICE_NANOSECONDS ? deadline - now : WAIT_SLICE_NANOSECONDS);
        if ((rc = store_check_interrupt())) return rc;
    }
}

int pyps_get_ticket(pyps_store *s, uint64_t version, pyps_ticket *out) {
    struct view *v;
    int rc = require(out);
    if (rc || (rc = copy_view(s, &v))) return rc;
    const struct ticket *t = view_ticket(v, version);
    if (!version || version > v->version || t->number != version)
        rc = fail(PYPS_EINVAL, "ticket: found %lu; expected one of the last %u versions up to %lu", version,
                  v->tickets, v->version);
    else if (t->kind != TICKET_PUSH)
        rc = fail(PYPS_EINVAL, "ticket: found %lu, a round; expected one push", version);
    else
        *out = (pyps_ticket){.size = sizeof *out,
                             .version = version,
                             .tag = {t->tag[0], t->tag[1]},
                             .samples = t->samples,
                             .scale = t->scale,
                             .share = t->share,
                             .part = t->part};
    free(v);
    return rc;
}

/* The journal begins with the view that it finds. */
static int begin_journal(pyps_store *s) {
    struct view *v = view_allocate(s);
    if (!v) return PYPS_ENOSPC;
    int rc = view_observe(s, v);
    if (!rc) rc = journal_view(s, v);
    free(v);
    return rc;
}

int pyps_journal(pyps_store *s, const char *path) {
    int rc = store_check_usable(s, false);
    if (rc) return rc;
    journal_close(s);
    if (!path) return PYPS_OK;
    segment_hold_forks();
    if (!(rc = journal_open(path, &s->journal))) s->journal_file = file_behind(s->journal);
    segment_release_forks();
    if (rc) return rc;
    if ((rc = begin_journal(s))) journal_close(s);
    return rc;
}
