/* core.c: the decision core on a private view, for virtual time. It takes the same steps as a store. */
#include <stdlib.h>
#include <string.h>

#include "policy/runs.h"

struct pyps_core {
    const struct policy *policy;
    struct view *view;
    bool looks, sketched; /* at gradients; the next push's is known */
    float sketch[SKETCH];
};

static struct view_config view_config_of(const pyps_config *c) {
    return (struct view_config){.participants = c->max_participants ? c->max_participants : c->ranks,
                                .ranks = c->ranks,
                                .staging_buffers = c->staging_buffers ? c->staging_buffers : 2,
                                .policy = c->policy,
                                .policy_params = c->policy_params,
                                .samples = c->samples ? c->samples : UINT64_MAX,
                                .round_timeout = config_round_timeout(c),
                                .batches = c->batches};
}

int pyps_core_create(const pyps_config *asked, pyps_core **out) {
    pyps_config config;
    int rc = require(out);
    if (rc) return rc;
    *out = NULL;
    if ((rc = config_read(asked, &config)) || (rc = config_check_ranks(&config))) return rc;
    struct view_config view_config = view_config_of(&config);
    if ((rc = pyps__between("max_participants", view_config.participants, view_config.ranks,
                            CONFIG_MAX_RANKS)) ||
        (rc = pyps__between("staging_buffers", view_config.staging_buffers, 1, MAX_STAGING_BUFFERS)))
        return rc;
    struct pyps_core *core = malloc(sizeof *core);
    if (core) core->view = malloc(view_bytes(view_config.participants, view_config.staging_buffers));
    if (!core || !core->view) {
        free(core);
        return fail(PYPS_ENOSPC, "out of memory for %u participants", view_config.participants);
    }
    view_init(core->view, &view_config);
    core->policy = policy_find(view_config.policy);
    core->looks = core->policy->needs_sketch && core->policy->needs_sketch(&view_config.policy_params);
    core->sketched = false;
    *out = core;
    return PYPS_OK;
}

void pyps_core_free(pyps_core *core) {
    if (!core) return;
    free(core->view);
    free(core);
}

static int check(const pyps_core *core, const pyps_event *e) {
    const struct view *v = core->view;
    int rc = pyps__between("kind", e->kind, PYPS_ON_JOIN, PYPS_ON_SCHEDULE);
    if (!rc) rc = pyps__between("slot", e->slot, 0, v->participants - 1);
    if (!rc && e->kind == PYPS_ON_PUSH) rc = pyps__between("staging", e->staging, 0, v->staging_buffers - 1);
    if (!rc && e->kind == PYPS_ON_LEAVE) rc = pyps__between("state", e->state, PYPS_LEFT, PYPS_DEAD);
    if (!rc && e->kind == PYPS_ON_REPLAN && !e->batches)
        rc = fail(PYPS_EINVAL, "batches: found NULL; expected one for each of %u ranks", v->ranks);
    if (!rc && e->kind == PYPS_ON_SCHEDULE)
        rc = config_check_turns(e->turns, v->ranks, v->ranks, e->period_seconds);
    bool needs_no_member = e->kind == PYPS_ON_JOIN || e->kind == PYPS_ON_TICK || e->kind == PYPS_ON_REPLAN ||
                           e->kind == PYPS_ON_SCHEDULE;
    if (!rc && !needs_no_member && view_member(v, e->slot)->state == PYPS_EMPTY)
        rc = fail(PYPS_EINVAL, "slot: found %u, which has no member; expected one that has joined", e->slot);
    return rc || e->kind != PYPS_ON_REPLAN ? rc : config_check_batches(e->batches, v->ranks);
}

static struct event event_in(const struct view *v, const pyps_event *e) {
    uint64_t id = view_member(v, e->slot)->id;
    return (struct event){.kind = (enum event_kind)e->kind,
                          .slot = e->slot,
                          .now = e->now,
                          .id = e->kind == PYPS_ON_JOIN ? v->sequence + 1 : id,
                          .role = PYPS_WORKER,
                          .rank = e->rank,
                          .state = e->state,
                          .staging = e->staging,
                          .samples = e->samples,
                          .version = e->kind == PYPS_ON_PUSH ? v->version : e->version,
                          .base_version = e->base_version,
                          .compute_nanoseconds = e->compute_nanoseconds,
                          .grad_norm_squared = e->grad_norm_squared,
                          .done = e->done,
                          .next = e->next,
                          .waited = e->waited,
                          .batches = e->batches,
                          .count = v->ranks,
                          .turns = e->turns,
                          .period_seconds = e->period_seconds,
                          .sent = e->sent,
                          .cost_nanoseconds = e->cost_nanoseconds,
                          .after_plus_1 = e->after_plus_1};
}

int pyps_core_step(pyps_core *core, const pyps_event *event, pyps_decision *out) {
    struct outcome o;
    pyps_event copy;
    int rc = require(core);
    if (rc || (rc = read_struct("event", event, next, &copy)) || (rc = require(out)) ||
        (rc = check(core, &copy)))
        return rc;
    struct view *v = core->view;
    struct event e = event_in(v, &copy);
    if (copy.kind == PYPS_ON_PUSH && core->sketched) {
        e.sketched = 1, core->sketched = false;
        memcpy(e.sketch, core->sketch, sizeof e.sketch);
    }
    enum verdict verdict = view_step(v, &e, &o);
    *out = (pyps_decision){.verdict = verdict,
                           .advice = (uint32_t)o.advice,
                           .rank = o.rank,
                           .scale = o.scale,
                           .ticket = o.ticket,
                           .staleness = o.staleness,
                           .first = o.claim.first,
                           .count = o.claim.count,
                           .batch = o.claim.batch,
                           .until = o.until,
                           .at = o.at,
                           .progress = core->policy->progress ? core->policy->progress(v) : 0,
                           .version = v->version,
                           .round = v->round,
                           .next_deadline = v->next_deadline,
                           .wake_epoch = v->wake_epoch,
                           .part = view_ticket(v, v->version)->part};
    if (o.code == TRY_AGAIN) out->verdict = PYPS_WAIT, out->at = e.now; /* ask again at once */
    return o.code < 0 ? o.code : PYPS_OK;
}

uint32_t pyps_core_sources(const pyps_core *core, uint32_t *slots, uint32_t *staging_buffers,
                           uint32_t *samples, float *scales, uint32_t capacity) {
    if (!core) return 0;
    const struct view *v = core->view;
    uint32_t count = v->round_sources < capacity ? v->round_sources : capacity;
    for (uint32_t i = 0; i < count; i++) {
        const struct source *from = &view_sources(v)[i];
        slots[i] = from->slot, staging_buffers[i] = from->staging, samples[i] = from->samples,
        scales[i] = from->scale;
    }
    return count;
}

int pyps_core_gradient(pyps_core *core, const float *gradient, uint64_t count) {
    int rc = require(core);
    if (rc || (count && (rc = require(gradient)))) return rc;
    if (!core->looks || !count) return core->looks;
    memset(core->sketch, 0, sizeof core->sketch);
    sketch_add(core->sketch, gradient, 0, count);
    return core->sketched = true;
}

double pyps_core_lookahead(const pyps_core *core, uint32_t slot) {
    return slot < core->view->participants ? view_lookahead(core->view, slot) : 0;
}

int pyps_core_ranks(const pyps_core *core, pyps_rank *out, uint32_t capacity) {
    int rc = require(core);
    if (rc || (capacity && (rc = require(out)))) return rc;
    for (uint32_t r = 0; r < core->view->ranks && r < capacity; r++) out[r] = view_rank(core->view, r)->total;
    return PYPS_OK;
}

int pyps_core_costs(const pyps_core *core, pyps_rank_cost *out, uint32_t capacity) {
    int rc = require(core);
    if (rc || (capacity && (rc = require(out)))) return rc;
    for (uint32_t r = 0; r < core->view->ranks && r < capacity; r++)
        out[r] = view_cost(view_rank(core->view, r));
    return PYPS_OK;
}
