/* saps_bound.c: SaPS's bound on staleness, from the times that the workers take.
 *
 * With T_i the seconds of worker i's claims, its m fastest workers push rho_m = sum of 1 / T_i gradients a second,
 * and a gradient of theirs is m steps late on average. As many steps are lost to staleness, and x to noise, so the
 * time of training goes as (m + x) / rho_m (Tyurin, Richtarik: NeurIPS 2023). m is where that is least. The bound
 * lets the slowest of these m push, with room for steps that last longer than most:
 *
 *     s = ceil(ROOM * T_m * rho_m)
 *
 * Where x is measured (saps_noise.c), that is s for x = USUAL, and the bound is s or x, the greater one: near the noise
 * floor late gradients are worth as much as others (Ringmaster's threshold too is the noise over the signal).
 *
 * Late gradients weigh less, so all are divided by the mean weight that the times predict, and the learning rate means
 * what it does where none is late. Worker i pushes 1 / T_i gradients a second, T_i * rho - 1 steps late, so that is
 *
 *     sum of 1 / T_i * min(1, s / (T_i * rho - 1)) over rho
 *
 * Gradients count in planned batches of mean size, and a worker with d steps under way as d. T_i is a moving
 * average over pushes, refused ones included, and never less than the time that the current claim has taken.
 */
#include <math.h>

#include "policy/saps_bound.h"

#define WINDOW   32   /* pushes over which a worker's time is averaged */
#define ROOM     1.5  /* times the delay of the slowest worker that the bound is made for */
#define USUAL    4    /* x that the bound is made for */
#define UNKNOWN  3    /* times what it has taken so far, a first claim is expected to take */
#define ROUNDING 1e-9 /* within which numbers are equal, so that workers of the same speed count together */

void saps_time_claim(struct view *v, const struct event *e, uint32_t samples) {
    const struct member *m = view_member(v, e->slot);
    const struct rank *rank = view_rank(v, (uint32_t)m->rank);
    struct saps_rank *own = saps_rank(rank);
    if (!samples || e->now <= m->claim_since) return;
    double seconds = (double)(e->now - m->claim_since) * 1e-9 * rank->total.batch / samples;
    if (own->cycles < UINT32_MAX) own->cycles++;
    if (own->cycles == 1) own->cycle_seconds = seconds;
    else policy_average(&own->cycle_seconds, seconds, own->cycles, WINDOW);
}

static double seconds_of(const struct view *v, const struct rank *rank, uint64_t now) {
    const struct member *m = view_member(v, rank->slot_plus_1 - 1);
    double under_way = m->claim_count && now > m->claim_since ? (double)(now - m->claim_since) * 1e-9 : 0;
    double known = saps_rank(rank)->cycle_seconds;
    return known > under_way ? known : under_way;
}

static struct rank *at_place(const struct view *v, uint32_t place) {
    return view_rank(v, saps_rank(view_rank(v, place))->by_speed);
}

/* The ranks at places 0 .. count-1 are to be sorted. */
static bool slower(const struct view *v, uint32_t a, uint32_t b) {
    const struct saps_rank *x = saps_rank(at_place(v, a)), *y = saps_rank(at_place(v, b));
    return x->claim_seconds > y->claim_seconds;
}

static void swap(struct view *v, uint32_t a, uint32_t b) {
    struct saps_rank *x = saps_rank(view_rank(v, a)), *y = saps_rank(view_rank(v, b));
    uint32_t kept = x->by_speed;
    x->by_speed = y->by_speed, y->by_speed = kept;
}

static void sift_down(struct view *v, uint32_t from, uint32_t count) {
    for (uint32_t parent = from, child; (child = 2 * parent + 1) < count; parent = child) {
        if (child + 1 < count && slower(v, child + 1, child)) child++;
        if (!slower(v, child, parent)) return;
        swap(v, parent, child);
    }
}

/* A heap sort, in place: a view has no room for another array, and the last order may be of any use or none. */
static void sort_by_speed(struct view *v, uint32_t count) {
    for (uint32_t i = count / 2; i-- > 0;) sift_down(v, i, count);
    for (uint32_t left = count; left > 1;) {
        swap(v, 0, --left);
        sift_down(v, 0, left);
    }
}

/* The ranks with samples and a worker whose time is known at all come first. Returns how many there are. */
static uint32_t find_times(struct view *v, uint64_t now) {
    uint32_t count = 0;
    uint64_t samples = 0;
    for (uint32_t r = 0; r < v->ranks; r++) {
        struct rank *rank = view_rank(v, r);
        if (!rank->slot_plus_1 || !rank->total.batch) continue;
        saps_rank(rank)->claim_seconds = seconds_of(v, rank, now);
        if (!(saps_rank(rank)->claim_seconds > 0)) continue;
        saps_rank(view_rank(v, count++))->by_speed = r;
        samples += rank->total.batch;
    }
    saps_limit(v)->mean_batch = count ? (double)samples / count : 0;
    return count;
}

/* Seconds between a worker's pull and its push. */
static double delay(const struct view *v, const struct rank *rank) {
    return (1.0 + view_member(v, rank->slot_plus_1 - 1)->wants_ahead) * saps_rank(rank)->claim_seconds;
}

double saps_weight(double staleness, double limit) { return staleness > limit ? limit / staleness : 1; }

/* How much longer than `claim_seconds` a worker's claims may take: of its first one only the time so far is known. */
static double longer(const struct rank *rank) { return saps_rank(rank)->cycles ? 1 : UNKNOWN; }

static double rate(const struct view *v, const struct rank *rank) {
    return rank->total.batch / saps_limit(v)->mean_batch / saps_rank(rank)->claim_seconds / longer(rank);
}

static double mean_weight(const struct view *v, uint32_t count) {
    double sum = 0, rho = 0;
    for (uint32_t place = 0; place < count; place++) rho += rate(v, at_place(v, place));
    for (uint32_t place = 0; place < count; place++) {
        const struct rank *rank = at_place(v, place);
        double own = rank->total.batch / saps_limit(v)->mean_batch;
        double late = delay(v, rank) * longer(rank) * rho - own;
        sum += rate(v, rank) * saps_weight(late, saps_limit(v)->limit);
    }
    return rho > 0 ? sum / rho : 1; /* no time is known */
}

void saps_set_bound(struct view *v, uint64_t now) {
    struct staleness_limit *l = saps_limit(v);
    uint32_t count = find_times(v, now);
    bool measures = saps_measures_noise(&v->policy_params);
    double late = measures ? USUAL : saps_noise(v), rho = 0, longest = 0, least = INFINITY;
    sort_by_speed(v, count);
    for (uint32_t place = 0; place < count; place++) {
        const struct rank *rank = at_place(v, place);
        double seconds = saps_rank(rank)->claim_seconds;
        double batch = rank->total.batch / l->mean_batch;
        if (delay(v, rank) > longest) longest = delay(v, rank);
        late += delay(v, rank) / seconds * batch, rho += batch / seconds;
        if (late > rho * least * (1 + ROUNDING)) continue;
        least = late / rho;
        l->limit = ceil(ROOM * longest * rho * (1 - ROUNDING));
    }
    if (measures) l->limit = fmax(l->limit, saps_noise(v));
    l->mean_weight = mean_weight(v, count);
}
