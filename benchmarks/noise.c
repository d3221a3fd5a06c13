/* noise.c: one training of noise.py in virtual time, with the decisions of the core; built and called by it.
 *
 * A worker starts, pulls, computes a gradient of what it pulled, and pushes it, as in pyps.simulate without a link.
 * Ringmaster ASGD (Maranjyan, Tyurin, Richtarik: ICML 2025) is here as published: a gradient that `ringmaster` or more
 * applied ones have overtaken is ignored.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "pyps.h"

enum { MOST_WORKERS = 256, MOST_DIMENSIONS = 64 };

struct problem {
    const double *x, *y, *best, *scales; /* [pool][d], [pool], [d], [d] */
    uint64_t pool;
    uint32_t d;
};

struct cluster {
    const double *seconds; /* [workers] of a step */
    uint32_t workers, batch;
    double jitter;            /* of a lognormal factor with mean 1 */
    double turn_seconds;      /* 0, or how long a group of workers keeps its speed */
    uint32_t groups, padding; /* of which one is fast, and the others take */
    double factor;            /* times as long */
};

struct worker {
    double w[MOST_DIMENSIONS];
    uint64_t first, applied, at; /* of the samples; gradients applied at its pull; when it pushes, nanoseconds */
    uint32_t count;
};

struct run {
    const struct problem *problem;
    const struct cluster *cluster;
    pyps_core *core;
    double w[MOST_DIMENSIONS];
    uint64_t random, now, applied;
    struct worker worker[MOST_WORKERS];
};

static double uniform(uint64_t *state) { /* splitmix64; above 0 */
    uint64_t x = *state += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (double)((x ^ x >> 31) >> 11) * 0x1p-53 + 0x1p-54;
}

static double normal(uint64_t *state) {
    double radius = sqrt(-2 * log(uniform(state)));
    return radius * cos(2 * 3.14159265358979323846 * uniform(state));
}

static double seconds(struct run *r, uint32_t k) {
    const struct cluster *c = r->cluster;
    double base = c->seconds[k] * exp(c->jitter * normal(&r->random) - c->jitter * c->jitter / 2);
    if (!(c->turn_seconds > 0)) return base;
    uint64_t fast = (uint64_t)((double)r->now * 1e-9 / c->turn_seconds) % c->groups;
    return fast == (uint64_t)k * c->groups / c->workers ? base : base * c->factor;
}

static int step(struct run *r, uint32_t kind, uint32_t k, uint32_t samples, pyps_decision *out) {
    pyps_event e = {.size = sizeof e, .kind = kind, .slot = k, .now = r->now, .rank = (int32_t)k};
    e.samples = samples, e.version = out->version;
    return pyps_core_step(r->core, &e, out);
}

static int start(struct run *r, uint32_t k, pyps_decision *d) {
    struct worker *m = &r->worker[k];
    int rc = step(r, PYPS_ON_START, k, 0, d);
    m->first = d->first, m->count = d->count, m->applied = r->applied;
    memcpy(m->w, r->w, sizeof m->w);
    m->at = r->now + (uint64_t)(seconds(r, k) * 1e9);
    return rc ? rc : step(r, PYPS_ON_PULL, k, 0, d);
}

static void gradient(const struct run *r, const struct worker *m, double *out) {
    const struct problem *p = r->problem;
    memset(out, 0, p->d * sizeof *out);
    for (uint32_t i = 0; i < m->count; i++) {
        const double *x = &p->x[(m->first + i) % p->pool * p->d];
        double off = -p->y[(m->first + i) % p->pool];
        for (uint32_t j = 0; j < p->d; j++) off += x[j] * m->w[j];
        for (uint32_t j = 0; j < p->d; j++) out[j] += off * x[j] / m->count;
    }
}

static double excess(const struct run *r) {
    double sum = 0;
    for (uint32_t j = 0; j < r->problem->d; j++) {
        double away = (r->w[j] - r->problem->best[j]) * r->problem->scales[j];
        sum += away * away / 2;
    }
    return sum;
}

/* A worker's gradient is ready. rate: of a gradient of a planned batch. */
static int push(struct run *r, uint32_t k, double rate, uint64_t ringmaster) {
    struct worker *m = &r->worker[k];
    double g[MOST_DIMENSIONS];
    float sent[MOST_DIMENSIONS];
    pyps_decision d = {0};
    gradient(r, m, g);
    for (uint32_t j = 0; j < r->problem->d; j++) sent[j] = (float)g[j];
    pyps_core_gradient(r->core, sent, r->problem->d);
    int rc = step(r, PYPS_ON_PUSH, k, m->count, &d);
    if (rc && rc != PYPS_EREJECTED) return rc;
    if (!rc && !(ringmaster && r->applied - m->applied >= ringmaster)) {
        double by = rate * d.scale * m->count / r->cluster->batch;
        for (uint32_t j = 0; j < r->problem->d; j++) r->w[j] -= by * g[j];
        r->applied++;
    }
    return start(r, k, &d);
}

static uint32_t next(const struct run *r) {
    uint32_t first = 0;
    for (uint32_t k = 1; k < r->cluster->workers; k++)
        if (r->worker[k].at < r->worker[first].at) first = k;
    return first;
}

static int train(struct run *r, double rate, uint64_t ringmaster, double target, double limit) {
    pyps_decision d = {0};
    uint32_t n = r->cluster->workers;
    int rc = 0;
    for (uint32_t k = 0; k < n && !rc; k++) rc = step(r, PYPS_ON_JOIN, k, 0, &d);
    for (uint32_t k = 0; k < n && !rc; k++) rc = start(r, k, &d);
    while (!rc) {
        uint32_t k = next(r);
        r->now = r->worker[k].at;
        if ((double)r->now * 1e-9 > limit) break;
        rc = push(r, k, rate, ringmaster);
        double loss = excess(r);
        if (loss <= target || !(loss < 1e9)) break;
    }
    return rc;
}

/* Seconds until the excess loss is at most the target; infinite: not within the limit; NaN: the core has refused. */
double seconds_to(const struct problem *problem, const struct cluster *cluster, uint32_t policy,
                  const pyps_policy_params *params, double rate, uint64_t ringmaster, uint64_t seed, double target,
                  double limit) {
    struct run *r = calloc(1, sizeof *r);
    uint32_t batches[MOST_WORKERS];
    pyps_config config = {.size = sizeof config, .ranks = cluster->workers, .policy = policy, .batches = batches};
    if (!r || cluster->workers > MOST_WORKERS || problem->d > MOST_DIMENSIONS) return free(r), NAN;
    for (uint32_t k = 0; k < cluster->workers; k++) batches[k] = cluster->batch;
    config.max_participants = cluster->workers, config.policy_params = *params, config.round_timeout_seconds = 60;
    r->problem = problem, r->cluster = cluster, r->random = seed;
    int rc = pyps_core_create(&config, &r->core);
    if (!rc) rc = train(r, rate, ringmaster, target, limit);
    double found = rc ? NAN : excess(r) <= target ? (double)r->now * 1e-9 : INFINITY;
    pyps_core_free(r->core);
    free(r);
    return found;
}
