/* protocol.c: interleavings of the store in which one thread stops at an exact place.
 *
 * Usage: protocol NAME. A `stalled` thread stops at a failpoint until it is let go; the main thread acts for
 * the others meanwhile. Every store has one chunk and every push adds -1 to all parameters, so the parameters
 * of version V are -V.
 */
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "common.h"

#define PARAMETERS 1000
#define FLAT       1024

struct stalled {
    pthread_t thread;
    sem_t arrived, go;
    const char *point; /* stops there once */
    pyps_store *store;
    int rc;
    uint64_t version;
    uint32_t sources; /* of a push */
    float flat[FLAT];
};

static _Thread_local struct stalled *self;
static unsigned awaited; /* predecessors by the main thread, with patience */

void pyps_failpoint(const char *name) {
    if (!self) awaited += !strcmp(name, "apply.waits");
    if (!self || !self->point || strcmp(self->point, name)) return;
    self->point = NULL;
    sem_post(&self->arrived);
    sem_wait(&self->go);
}

static void *run_snapshot(void *argument) {
    self = argument;
    self->rc = pyps_snapshot(self->store, self->flat, NULL, NULL, 10, &self->version);
    return NULL;
}

static void *run_push(void *argument) {
    self = argument;
    pyps_push_result result = {0};
    self->rc = push_value(self->store, 1, PYPS_F32, &result);
    self->version = result.version, self->sources = result.sources;
    return NULL;
}

/* Returns when `s` stands at the failpoint; NULL: it goes on. */
static void stall(struct stalled *s, pyps_store *store, void *(*body)(void *), const char *point) {
    *s = (struct stalled){.store = store, .point = point};
    sem_init(&s->arrived, 0, 0), sem_init(&s->go, 0, 0);
    CHECK(!pthread_create(&s->thread, NULL, body, s), "no thread");
    if (point) sem_wait(&s->arrived);
}

static void let_go(struct stalled *s) {
    sem_post(&s->go);
    pthread_join(s->thread, NULL);
}

static pyps_store *joined(int role) {
    pyps_store *s;
    must(pyps_open("protocol", PYPS_ABI, &s), "open");
    must(pyps_join(s, role, -1, NULL), "join");
    return s;
}

static void push(pyps_store *s) {
    pyps_push_result result;
    must(push_value(s, 1, PYPS_F32, &result), "push");
}

/* What a pusher does when the snapshot keeps it waiting for longer than the grace. */
static void cancel_snapshot(pyps_store *s) {
    must(view_load_snapshot(s), "load");
    CHECK(s->snapshot_active, "no snapshot to cancel");
    struct event e = store_event(s, EVENT_SNAPSHOT_CANCEL);
    struct outcome out;
    enum verdict verdict;
    e.snapshot = s->snapshot;
    must(view_commit(s, &e, &out, &verdict), "cancel");
}

static void check_snapshot(const struct stalled *s, const char *name, uint64_t version) {
    CHECK(!s->rc, "%s: %s", name, pyps_error_name(s->rc));
    CHECK(s->version == version, "%s: found version %llu; expected %llu", name,
          (unsigned long long)s->version, (unsigned long long)version);
    for (int i = 0; i < PARAMETERS; i++)
        CHECK(s->flat[i] == -(float)version, "%s: parameter %d: found %g; expected %g", name, i,
              (double)s->flat[i], -(double)version);
}

/* A cancelled snapshot's reader wakes up late and says that it is done with a chunk. The next snapshot has
 * saved that chunk meanwhile, its reader has found where, and has not pinned it yet: it must still get it. */
static void late_reader(pyps_store *worker) {
    static struct stalled first, second;
    pyps_store *a = joined(PYPS_OBSERVER), *b = joined(PYPS_OBSERVER);
    push(worker);
    stall(&first, a, run_snapshot, "snapshot.copied");
    cancel_snapshot(worker);
    stall(&second, b, run_snapshot, "snapshot.begun");
    push(worker); /* saves version 1 for the second */
    second.point = "snapshot.found", sem_post(&second.go);
    sem_wait(&second.arrived);
    let_go(&first);
    for (int i = 0; i < 8; i++) push(worker); /* reuse whatever is free */
    let_go(&second);
    check_snapshot(&first, "the cancelled one had its chunk already", 1);
    check_snapshot(&second, "the second", 1);
    must(pyps_close(a), "close"), must(pyps_close(b), "close");
}

/* The same reader wakes up while a pusher saves for the next snapshot: the save must not be lost. */
static void late_reader_meets_saver(pyps_store *worker) {
    static struct stalled first, second, pusher;
    pyps_store *a = joined(PYPS_OBSERVER), *b = joined(PYPS_OBSERVER);
    push(worker);
    stall(&first, a, run_snapshot, "snapshot.copied");
    cancel_snapshot(worker);
    stall(&second, b, run_snapshot, "snapshot.begun");
    stall(&pusher, worker, run_push, "apply.saving");
    let_go(&first);
    let_go(&pusher);
    CHECK(!pusher.rc && pusher.version == 2, "push: %s", pyps_error_name(pusher.rc));
    for (int i = 0; i < 8; i++) push(worker);
    let_go(&second);
    check_snapshot(&second, "the second", 1);
    must(pyps_close(a), "close"), must(pyps_close(b), "close");
}

/* A reader that stops for longer than the round timeout delays no other participant. */
static void stopped_reader(pyps_store *worker) {
    static struct stalled first, second;
    pyps_store *a = joined(PYPS_OBSERVER), *b = joined(PYPS_OBSERVER);
    push(worker);
    stall(&first, a, run_snapshot, "snapshot.begun");
    push(worker);
    stall(&second, b, run_snapshot, NULL);
    pthread_join(second.thread, NULL);
    check_snapshot(&second, "the second", 2);
    let_go(&first);
    CHECK(first.rc == PYPS_ESTALE, "the first: found %s", pyps_error_name(first.rc));
    must(pyps_close(a), "close"), must(pyps_close(b), "close");
}

static void *run_tick(void *argument) {
    self = argument;
    struct event tick = store_event(self->store, EVENT_TICK);
    struct outcome out;
    enum verdict verdict;
    tick.waited = self->store->geometry.round_timeout_nanoseconds;
    self->rc = view_commit(self->store, &tick, &out, &verdict);
    return NULL;
}

static void *run_pull(void *argument) {
    self = argument;
    self->rc = pyps_pull(self->store, self->flat, &self->version);
    return NULL;
}

/* A worker claims samples while a waiter that has read an earlier view is about to fence late members, and
 * while another event is decided whose CAS is lost: neither may use times of the earlier view. */
static void late_decision(pyps_store *worker) {
    static struct stalled waiter, puller;
    pyps_store *a = joined(PYPS_OBSERVER), *b;
    uint64_t before, word;
    pyps_claim claim;
    push(worker); /* the waiter's view is another's, which it reads */
    stall(&waiter, a, run_tick, "view.hazard");
    must(pyps_start(worker, 1, &claim), "start");
    let_go(&waiter);
    must(waiter.rc, "tick");
    push(worker); /* a worker that has just started is not late */
    stall(&puller, worker, run_pull, "view.decided");
    b = joined(PYPS_OBSERVER);
    must(view_draft(b, &word), "view");
    before = b->draft->now;
    let_go(&puller);
    must(puller.rc, "pull"), must(view_draft(b, &word), "view");
    CHECK(b->draft->event_kind == EVENT_PULL && b->draft->now >= before, "time went back by %llu ns",
          (unsigned long long)(before - b->draft->now));
    must(pyps_close(a), "close"), must(pyps_close(b), "close");
}

static void *run_unlink(void *argument) {
    self = argument;
    self->rc = pyps_unlink("passing", 0);
    return NULL;
}

/* One process has opened a segment to remove it; another one removes it first, and a new run takes the name.
 * The new run's segment must stay. */
static void late_remover(pyps_store *worker) {
    static struct stalled remover;
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    uint32_t batches[] = {1};
    pyps_config config = small_config(&tensor, batches, 1, PYPS_ASP);
    pyps_store *s, *opened;
    (void)worker;
    must(pyps_create("passing", PYPS_ABI, &config, &s), "create"), must(pyps_close(s), "close");
    stall(&remover, NULL, run_unlink, "unlink.all_joined");
    must(pyps_unlink("passing", 0), "unlink");
    must(pyps_create("passing", PYPS_ABI, &config, &s), "create again");
    let_go(&remover);
    CHECK(remover.rc == PYPS_ENOENT, "the late remover: found %s", pyps_error_name(remover.rc));
    must(pyps_open("passing", PYPS_ABI, &opened), "the new run's segment");
    must(pyps_close(opened), "close"), must(pyps_close(s), "close");
    stall(&remover, NULL, run_unlink, "unlink.checked"); /* no other may remove it now, by force or not */
    CHECK(pyps_unlink("passing", 1) == PYPS_EBUSY, "removed twice");
    let_go(&remover);
    must(remover.rc, "unlink");
}

/* Others apply a stopped pusher's ticket, chunk after chunk, and wait for it only once. */
static void stopped_pusher(pyps_store *worker) {
    static struct stalled pusher;
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {100 * FLAT}};
    uint32_t batches[] = {1, 1};
    pyps_config config = small_config(&tensor, batches, 2, PYPS_ASP);
    pyps_push_result result;
    pyps_store *a, *b;
    (void)worker;
    must(pyps_create("passing", PYPS_ABI, &config, &a), "create"),
        must(pyps_open("passing", PYPS_ABI, &b), "open");
    must(pyps_join(a, PYPS_WORKER, 0, NULL), "join"), must(pyps_join(b, PYPS_WORKER, 1, NULL), "join");
    stall(&pusher, a, run_push, "push.admitted");
    awaited = 0;
    must(push_value(b, 1, PYPS_F32, &result), "push");
    CHECK(result.version == 2 && awaited == 1, "version %llu after %u waits",
          (unsigned long long)result.version, awaited);
    let_go(&pusher);
    must(pusher.rc, "push");
    must(pyps_close(b), "close"), must(pyps_close(a), "close");
    must(pyps_unlink("passing", 0), "unlink");
}

static void *run_leave(void *argument) {
    self = argument;
    self->rc = pyps_leave(self->store);
    return NULL;
}

/* Three workers under softsync: a step from two gradients once one has left. */
static void open_three(pyps_store **s) {
    static const uint32_t batches[] = {4, 4, 4};
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    pyps_config config = small_config(&tensor, batches, 3, policy_numbered("softsync"));
    config.policy_params.splits = 1, config.max_participants = 3;
    must(pyps_create("passing", PYPS_ABI, &config, &s[0]), "create");
    must(pyps_open("passing", PYPS_ABI, &s[1]), "open"), must(pyps_open("passing", PYPS_ABI, &s[2]), "open");
    for (int k = 0; k < 3; k++) must(pyps_join(s[k], PYPS_WORKER, k, NULL), "join");
}

/* The round's two gradients are 1, and so is their mean. */
static void close_three(pyps_store **s, struct stalled *closer) {
    uint64_t version;
    float flat[FLAT];
    let_go(closer);
    must(closer->rc, "push");
    must(pyps_pull(s[2], flat, &version), "pull");
    CHECK(version == 1 && flat[PARAMETERS - 1] == -1, "found %g at version %llu",
          (double)flat[PARAMETERS - 1], (unsigned long long)version);
    for (int k = 0; k < 3; k++) must(pyps_close(s[k]), "close");
    must(pyps_unlink("passing", 0), "unlink");
}

/* A worker with a gradient in a round leaves. The round closes when it has completed all tickets but has not looked
 * what its staging buffers are needed for: its gradient is in a ticket that no participant has applied. */
static void leaver(pyps_store *worker) {
    static struct stalled leaves, closes;
    pyps_store *s[3];
    (void)worker;
    open_three(s), push(s[0]);
    stall(&leaves, s[0], run_leave, "leave.completed");
    stall(&closes, s[1], run_push, "push.admitted");
    let_go(&leaves);
    must(leaves.rc, "leave");
    close_three(s, &closes);
}

/* The push that closes a round knows how large that was, when the next one has closed before it goes on. */
static void late_closer(pyps_store *worker) {
    static struct stalled closes;
    pyps_store *s[3];
    (void)worker;
    open_three(s), push(s[0]), push(s[1]);
    stall(&closes, s[2], run_push, "push.admitted");
    push(s[0]), push(s[1]), push(s[0]);
    let_go(&closes);
    CHECK(!closes.rc && closes.version == 1 && closes.sources == 3, "%s: version %llu of %u gradients",
          pyps_error_name(closes.rc), (unsigned long long)closes.version, closes.sources);
    for (int k = 0; k < 3; k++) must(pyps_close(s[k]), "close");
    must(pyps_unlink("passing", 0), "unlink");
}

static void *run_open(void *argument) {
    self = argument;
    self->rc = pyps_open("passing", PYPS_ABI, &self->store);
    return NULL;
}

/* A child that is forked while another thread opens a segment has no part in it, nor in its locks. */
static void fork_while_opening(pyps_store *worker) {
    static struct stalled opener;
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    uint32_t batches[] = {1};
    pyps_config config = small_config(&tensor, batches, 1, PYPS_ASP);
    pyps_store *s;
    int ready[2];
    char byte;
    (void)worker;
    must(pyps_create("passing", PYPS_ABI, &config, &s), "create"), must(pyps_close(s), "close");
    stall(&opener, NULL, run_open, "open.begun");
    CHECK(!pipe(ready), "no pipe");
    pid_t child = fork();
    while (!child) CHECK(write(ready[1], "", 1) == 1 && pause(), "the parent is gone");
    CHECK(read(ready[0], &byte, 1) == 1, "no child");
    let_go(&opener);
    must(opener.rc, "open"), must(pyps_close(opener.store), "close");
    int rc = pyps_unlink("passing", 0);
    kill(child, SIGKILL), waitpid(child, NULL, 0);
    must(rc, "the child has it open: unlink");
}

/* A reader that has not joined applies no tickets: it has no spare buffers. */
static void anonymous_reader(pyps_store *worker) {
    static struct stalled pusher;
    pyps_status status;
    pyps_store *reader;
    must(pyps_open("protocol", PYPS_ABI, &reader), "open");
    stall(&pusher, worker, run_push, "push.admitted");
    must(pyps_get_status(reader, &status), "status");
    uint64_t applied = word_version(load_acquire(&reader->words[0]));
    CHECK(status.version == 1 && !applied, "version %llu, of which the reader applied %llu",
          (unsigned long long)status.version, (unsigned long long)applied);
    let_go(&pusher);
    must(pusher.rc, "push"), must(pyps_close(reader), "close");
}

/* Only workers step: an observer has no rank and no staging. */
static void observer_steps(pyps_store *worker) {
    pyps_store *s = joined(PYPS_OBSERVER);
    pyps_claim claim;
    uint32_t staging;
    pyps_push_args args = {.size = sizeof args};
    pyps_push_result result;
    (void)worker;
    CHECK(pyps_start(s, 0, &claim) == PYPS_EINVAL, "an observer may start");
    CHECK(pyps_stage(s, 0, &staging) == PYPS_EINVAL, "an observer may stage");
    CHECK(pyps_push(s, &args, &result) == PYPS_EINVAL, "an observer may push");
    must(pyps_close(s), "close");
}

static const struct {
    const char *name;
    void (*body)(pyps_store *worker);
    double round_timeout; /* seconds */
} tests[] = {
    {"late-reader", late_reader, 60},           {"late-reader-meets-saver", late_reader_meets_saver, 60},
    {"stopped-reader", stopped_reader, 0.2},    {"observer-steps", observer_steps, 60},
    {"late-decision", late_decision, 60},       {"late-remover", late_remover, 60},
    {"stopped-pusher", stopped_pusher, 60},     {"leaver", leaver, 60},
    {"late-closer", late_closer, 60},           {"fork-while-opening", fork_while_opening, 60},
    {"anonymous-reader", anonymous_reader, 60},
};

static void run(size_t test) {
    pyps_tensor tensor = {.name = "w", .ndim = 1, .shape = {PARAMETERS}};
    uint32_t batches[] = {1};
    pyps_config config = small_config(&tensor, batches, 1, PYPS_ASP);
    pyps_store *s;
    config.round_timeout_seconds = tests[test].round_timeout;
    must(pyps_create("protocol", PYPS_ABI, &config, &s), "create");
    must(pyps_join(s, PYPS_WORKER, 0, NULL), "join");
    tests[test].body(s);
    must(pyps_close(s), "close");
    must(pyps_unlink("protocol", 0), "unlink");
}

int main(int argc, char **argv) {
    for (size_t i = 0; argc == 2 && i < sizeof tests / sizeof *tests; i++)
        if (!strcmp(tests[i].name, argv[1])) {
            alarm(60);
            run(i);
            return 0;
        }
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) puts(tests[i].name);
    return argc == 1 ? 0 : 2;
}
