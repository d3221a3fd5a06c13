/* replay.c: reads a journal file and decides its events again on private views. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "policy/runs.h"

uint64_t journal_digest(const struct view *v) {
    size_t bytes = view_used_bytes(v);
    const uint8_t *at = (const uint8_t *)v;
    uint64_t h = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word;
        memcpy(&word, at + i, 8);
        h = (h ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        h ^= h >> 29;
    }
    return h;
}

struct replay {
    struct view *view, *next; /* NULL: no view read yet */
    size_t capacity;
    pyps_replay_result *out;
};

static bool can_be_view(const struct journal_entry *entry, const struct view *v) {
    size_t bytes = entry->bytes - sizeof *entry;
    if (bytes < sizeof *v || !v->participants || v->participants > CONFIG_MAX_RANKS || !v->ranks ||
        v->ranks > v->participants || !v->staging_buffers || v->staging_buffers > MAX_STAGING_BUFFERS ||
        !view_sized(v))
        return false;
    size_t needed = view_used_bytes(v);
    return bytes >= needed && bytes < needed + 8 && !policy_check(v->policy, &v->policy_params) &&
           view_valid(v, v);
}

/* What a handle checks before it asks: only workers take steps, and the rank exists. */
static bool can_be_event(const struct journal_entry *entry, const struct view *v) {
    const struct event *e = &entry->event;
    if (e->kind > EVENT_COST_MODEL || e->slot >= v->participants || e->staging >= v->staging_buffers)
        return false;
    if (e->residual > RESIDUALS_A_SLOT * v->participants) return false;
    if (e->kind == EVENT_JOIN)
        return e->rank >= -1 && e->rank < (int32_t)v->participants && (e->role == PYPS_WORKER || e->rank < 0);
    if (e->kind == EVENT_REPLAN)
        return e->count <= v->participants && entry->bytes >= sizeof *entry + e->count * sizeof *e->batches;
    if (e->kind == EVENT_SCHEDULE)
        return e->count <= v->participants && entry->bytes >= sizeof *entry + e->count * sizeof *e->turns &&
               !config_check_turns((const pyps_turn *)(entry + 1), e->count, e->count, e->period_seconds);
    bool any_member = e->kind == EVENT_LEAVE || e->kind == EVENT_TICK ||
                      (e->kind >= EVENT_SNAPSHOT_BEGIN && e->kind <= EVENT_SNAPSHOT_CANCEL);
    return any_member || view_member(v, e->slot)->rank >= 0 || e->kind == EVENT_PULL;
}

static int start_at(struct replay *r, const struct journal_entry *entry) {
    const struct view *v = (const struct view *)(entry + 1);
    if (!can_be_view(entry, v))
        return fail(PYPS_ECORRUPT, "journal: view %lu is not a valid view", entry->sequence);
    size_t bytes = view_bytes(v->participants, v->staging_buffers);
    free(r->view), free(r->next);
    r->view = calloc(1, bytes), r->next = malloc(bytes), r->capacity = bytes;
    if (!r->view || !r->next) return fail(PYPS_ENOSPC, "out of memory for a view of %zu bytes", bytes);
    memcpy(r->view, v, view_used_bytes(v));
    return PYPS_OK;
}

static bool same_outcome(const struct outcome *a, const struct outcome *b) {
    return a->code == b->code && a->ticket == b->ticket && a->round == b->round && a->until == b->until &&
           a->at == b->at && a->staleness == b->staleness &&
           memcmp(&a->scale, &b->scale, sizeof a->scale) == 0 && a->advice == b->advice &&
           a->rank == b->rank && a->snapshot == b->snapshot && a->version == b->version &&
           memcmp(&a->claim, &b->claim, sizeof a->claim) == 0;
}

static void count_difference(pyps_replay_result *out, const struct journal_entry *entry, const char *what) {
    const struct event *e = &entry->event;
    if (!out->differences++)
        snprintf(out->first, sizeof out->first, "view %lu, event %u of slot %u: %s", entry->sequence,
                 (unsigned)e->kind, e->slot, what);
}

static int decide(struct replay *r, const struct journal_entry *entry) {
    struct event e = entry->event;
    struct outcome o;
    if (!can_be_event(entry, r->view))
        return fail(PYPS_ECORRUPT, "journal: an event on view %lu is not valid", entry->sequence);
    e.batches = e.kind == EVENT_REPLAN ? (const uint32_t *)(entry + 1) : NULL;
    e.turns = e.kind == EVENT_SCHEDULE ? (const pyps_turn *)(entry + 1) : NULL;
    memcpy(r->next, r->view, r->capacity);
    enum verdict verdict = view_step(r->next, &e, &o);
    r->out->decisions++;
    if (verdict != (enum verdict)entry->verdict) count_difference(r->out, entry, "another verdict");
    else if (!same_outcome(&o, &entry->outcome)) count_difference(r->out, entry, "another outcome");
    else if (verdict == STEP_COMMIT && journal_digest(r->next) != entry->digest)
        count_difference(r->out, entry, "another view");
    if (entry->verdict != STEP_COMMIT) return PYPS_OK;
    struct view *before = r->view;
    r->view = r->next, r->next = before;
    r->out->events++;
    return PYPS_OK;
}

/* Replays one entry, in the order of views. */
static int replay_entry(struct replay *r, const struct journal_entry *entry) {
    uint64_t at = r->view ? r->view->sequence : 0;
    bool commits = entry->event.kind && entry->verdict == STEP_COMMIT;
    if (r->view && entry->sequence == at + commits) {
        if (entry->event.kind) return decide(r, entry);
        if (journal_digest(r->view) != entry->digest) count_difference(r->out, entry, "another view");
        return PYPS_OK;
    }
    if (entry->event.kind) return PYPS_OK; /* before the first view on file, or after a missing event */
    if (r->view) r->out->missing_events += entry->sequence - at;
    return start_at(r, entry);
}

/* By store and view; the event that led to a view comes first. */
static int in_order(const void *left, const void *right) {
    const struct journal_entry *a = *(const struct journal_entry *const *)left,
                               *b = *(const struct journal_entry *const *)right;
    if (a->store != b->store) return a->store < b->store ? -1 : 1;
    if (a->sequence != b->sequence) return a->sequence < b->sequence ? -1 : 1;
    int first = a->event.kind && a->verdict == STEP_COMMIT,
        second = b->event.kind && b->verdict == STEP_COMMIT;
    if (first != second) return second - first;
    return a < b ? -1 : a > b;
}

/* The entries of one store, in order. */
static int replay_store(struct journal_entry **entries, size_t count, pyps_replay_result *out) {
    struct replay r = {.out = out};
    int rc = PYPS_OK;
    for (size_t i = 0; i < count && !rc; i++) rc = replay_entry(&r, entries[i]);
    if (!rc && r.view && entries[count - 1]->sequence > r.view->sequence)
        out->missing_events += entries[count - 1]->sequence - r.view->sequence;
    free(r.view), free(r.next);
    return rc;
}

static int replay_all(struct journal_entry **entries, size_t count, pyps_replay_result *out) {
    int rc = PYPS_OK;
    qsort(entries, count, sizeof *entries, in_order);
    for (size_t first = 0, next = 0; first < count && !rc; first = next) {
        while (next < count && entries[next]->store == entries[first]->store) next++;
        rc = replay_store(entries + first, next - first, out);
    }
    return rc;
}

/* Finds the entries in a file's bytes; an incomplete last one is left out. */
static int find_entries(uint8_t *data, size_t bytes, struct journal_entry ***out, size_t *count) {
    size_t capacity = bytes / sizeof(struct journal_entry) + 1;
    struct journal_entry **entries = malloc(capacity * sizeof *entries);
    if (!entries) return fail(PYPS_ENOSPC, "out of memory for %zu events", capacity);
    *out = entries, *count = 0;
    for (size_t at = 0; at + sizeof(struct journal_entry) <= bytes;) {
        struct journal_entry *entry = (struct journal_entry *)(void *)(data + at);
        if (entry->mark != JOURNAL_MARK || entry->bytes < sizeof *entry ||
            entry->bytes > JOURNAL_MAX_ENTRY_BYTES || entry->bytes & 7)
            return fail(PYPS_ECORRUPT, "journal: byte %zu: no entry of a journal", at);
        if (entry->bytes > bytes - at) break;
        entries[(*count)++] = entry;
        at += entry->bytes;
    }
    return PYPS_OK;
}

static int read_all(const char *path, uint8_t **data, size_t *bytes) {
    struct stat status;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    *data = NULL, *bytes = 0;
    if (fd < 0 || fstat(fd, &status) || !S_ISREG(status.st_mode)) {
        int rc = fail(errno == ENOENT ? PYPS_ENOENT : PYPS_ESYS, "journal: %s: %s", path, strerror(errno));
        if (fd >= 0) rc = fail(PYPS_ECORRUPT, "journal: %s: not a regular file", path);
        if (fd >= 0) close(fd);
        return rc;
    }
    *data = malloc((size_t)status.st_size + 1);
    while (*data && *bytes < (size_t)status.st_size) {
        ssize_t got = read(fd, *data + *bytes, (size_t)status.st_size - *bytes);
        if (got <= 0) break;
        *bytes += (size_t)got;
    }
    close(fd);
    return *data ? PYPS_OK : fail(PYPS_ENOSPC, "out of memory for a journal of %ld bytes", status.st_size);
}

int pyps_replay(const char *path, pyps_replay_result *out) {
    uint8_t *data;
    size_t bytes, count = 0;
    struct journal_entry **entries = NULL;
    int rc = require(path);
    if (rc || (rc = require(out))) return rc;
    *out = (pyps_replay_result){0};
    rc = read_all(path, &data, &bytes);
    if (!rc) rc = find_entries(data, bytes, &entries, &count);
    if (!rc && count) rc = replay_all(entries, count, out);
    free(entries), free(data);
    return rc;
}
