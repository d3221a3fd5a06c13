/* chunk.pml: how chunk buffers change hands, in every interleaving.
 *
 * Two workers push, two observers pull, and one of them may be killed between any two of its steps; a worker
 * that lives reclaims what the dead one held. With -DDEATHS there is one observer, and as many processes may be
 * killed, and are not reclaimed: of the workers, the second one joins late, brings its spares, helps with the
 * tickets that it finds, and both times it looks for a buffer there must be one. With -DCREW there is no observer, and
 * the first worker has a thread that takes chunks of its calls and dies with it, in one step. A step is one access to shared memory; names are those of csrc.
 * Simpler than there:
 *
 *   - A copy or an update of a whole buffer is no step: it lasts from the step before it to the one after it,
 *     and both look at what the buffers hold: a version, or the mark of the worker that is writing.
 *   - Admission, a CAS on the view, is one step. A search may try any buffer next: hints decide no more.
 *   - There are two spares or three, not two for each slot, so that they are reused the sooner. With two, a
 *     search may wait for what the dead one has, so for ever; with three and one push for the living alone.
 *   - Memory is sequentially consistent. atomics.h argues why the store may be seen so.
 *
 * Snapshots and the buffers of views are left out; clip.pml and leave.pml have staging buffers.
 */

#ifndef CHUNKS
#define CHUNKS 1
#endif
#ifndef PUSHES
#define PUSHES 2 /* by both workers together */
#endif
#ifndef SPARES
#define SPARES 2
#endif

#ifndef PASSES
#define PASSES 0 /* 1: every other push, the first one too, has nothing for the chunks: they keep their buffers */
#endif
#define passes(ticket)   (PASSES && (ticket) % 2)
#define applied(version) (passes(version) -> (version) - 1 : (version)) /* the last push that a chunk shows */

/* -DMUTANT=NO_RECHECK and so on: a protocol with one fault. */
#define NO_FAULT      0
#define NO_RECHECK    1 /* a pin does not read the word again */
#define NO_HAZARDS    2 /* a claim does not look at the hazards */
#define NO_GENERATION 3 /* a claim does not notice another claim in between */
#define NO_COMPARE    4 /* a word is stored over whatever it is by then */
#define NO_CHUNK      5 /* what a lost CAS left is used for the next chunk without saying so */
#define NO_COMPLETION 6 /* the dead one's admitted push is forgotten */
#define NO_RELEASE    7 /* the dead one's buffer is forgotten */
#define STOPPED       8 /* the dead one is merely slow */
#define HELP_FIRST    9 /* a joiner helps before it has brought its spares */
#define NO_WAIT      10 /* a call returns while its thread is at work on a chunk */
#define ONE_SLOT     11 /* a thread has no slot of its own */
#define NO_HAND      12 /* the dead one's thread is forgotten */
#ifndef MUTANT
#define MUTANT NO_FAULT
#endif
#ifndef DEATHS
#define DEATHS 0 /* not reclaimed, of a worker that joins late and of the observer */
#endif

#ifndef CREW
#define CREW 0 /* 1: worker 0 has a thread */
#endif

#define WORKERS 2 /* in slots 0 and 1 */
#define HAND    2 /* the thread's slot */
#if CREW
#define HOLDERS 3
#else
#define HOLDERS WORKERS
#endif
#if DEATHS
#define SLOTS   3
#undef SPARES
#define SPARES  4 /* two of each worker; the observer, which holds none, needs none of its own */
#define JOINERS_SPARE(b) ((b) == CHUNKS || (b) == CHUNKS + 1)
#else
#if CREW
#define SLOTS   3
#else
#define SLOTS   4
#endif
#define JOINERS_SPARE(b) false
#endif
#define BUFFERS (CHUNKS + SPARES)
#define NONE    7

/* words.h */
#define word_make(version, buffer) ((version) << 3 | (buffer))
#define word_version(word)         ((word) >> 3)
#define word_buffer(word)          ((word) & 7)
#define owner_make(generation, holder, chunk) ((generation) << 6 | (holder) << 3 | (chunk))
#define owner_generation(owner)    ((owner) >> 6)
#define owner_holder(owner)        ((owner) >> 3 & 7)
#define owner_chunk(owner)         ((owner) & 7)
#define HOLDER_NOBODY              0
#define HOLDER_ABSENT              7 /* not brought yet */
#define holder_of(slot)            ((slot) + 1)

byte words[CHUNKS];
short owners[BUFFERS];
byte chunk_hazard[SLOTS]; /* a buffer + 1, or 0 */
byte holds[BUFFERS];
byte admitted;    /* the view's version */
byte dead = NONE; /* the slot of the process that is gone */
bool locked;      /* that slot's byte; it stays so, for a slot is reclaimed once */

/* Not shared: only assertions look at another's. */
byte private_buffer[HOLDERS];

#if CREW /* crew.c */
byte taken;        /* chunks of the present call */
byte goal;         /* its version */
bool working;      /* the thread has not done with it */
bool hand_locked;  /* by a worker that reclaims the dead thread's slot */
#define is_free_of(b) (private_buffer[(me + 1) % HOLDERS] != (b) && private_buffer[(me + 2) % HOLDERS] != (b))
#else
#define is_free_of(b) (private_buffer[1 - me] != (b))
#endif

chan kill = [0] of { byte }; /* a process that receives it is dead, and its memory gone, in one step */

#define WRITTEN_BY(slot) (100 + (slot))

#define is_whole(word) (holds[word_buffer(word)] == applied(word_version(word)))

/* chunk_pin in buffers.c, and the first look at what is pinned */
inline chunk_pin(chunk) {
    do
    :: word = words[chunk];
       chunk_hazard[me] = word_buffer(word) + 1; /* R1 of atomics.h */
       if
       :: atomic { words[chunk] == word || MUTANT == NO_RECHECK -> assert(is_whole(word)) } /* R2 */
          break
       :: else
       fi
    od
}

/* The last look, and chunk_unpin in buffers.c. Here and below what is not needed again is forgotten. */
inline chunk_unpin() {
    atomic {
        assert(is_whole(word));
        chunk_hazard[me] = 0;
        word = 0
    }
}

/* The private buffer is one's own from here on, and written from here on. */
inline hold(generation, chunk) {
    owners[private_buffer[me]] = owner_make(generation, holder_of(me), chunk);
    holds[private_buffer[me]] = WRITTEN_BY(me)
}

#define unheld(b)   (b) < BUFFERS && owner_holder(owners[(b) % BUFFERS]) == HOLDER_NOBODY -> buffer = b
#define is_named()  (owner_chunk(owner) != NONE && word_buffer(words[owner_chunk(owner) % CHUNKS]) == buffer)
#define hazarded()  (chunk_hazard[slot % SLOTS] == buffer + 1 && MUTANT != NO_HAZARDS)
#define unchanged() (owners[buffer] == owner || MUTANT == NO_GENERATION)

/* try_claim in buffers.c, of a buffer that had no holder when its owner word was read */
inline try_claim(chunk) {
    if
    :: atomic { is_named() -> buffer = 0; owner = 0 }
    :: else ->
       do
       :: atomic { slot < SLOTS && !hazarded() -> slot++ } /* W2 */
       :: atomic { slot < SLOTS && hazarded() -> buffer = 0; owner = 0; slot = 0; break }
       :: atomic { slot == SLOTS && !unchanged() -> buffer = 0; owner = 0; slot = 0; break }
       :: atomic {
              slot == SLOTS && unchanged() ->
              assert(is_free_of(buffer));
              private_buffer[me] = buffer;
              hold(owner_generation(owner) + 1, chunk);
              buffer = 0; owner = 0; slot = 0;
              break
          }
       od
    fi
}

/* At any moment a process that needs a buffer could claim one: its search ends. */
inline assert_one_is_free() {
    d_step {
        found = 0;
        for (slot : 0 .. BUFFERS - 1) {
            if
            :: owner_holder(owners[slot]) == HOLDER_NOBODY && slot != word_buffer(words[0]) &&
               chunk_hazard[0] != slot + 1 && chunk_hazard[1] != slot + 1 && chunk_hazard[2] != slot + 1 -> found++
            :: else
            fi
        }
        assert(found > 0);
        found = 0; slot = 0
    }
}

/* buffer_claim in buffers.c, with find_free: the buffer that a lost CAS left, or any free one */
inline buffer_claim(chunk) {
    do
    :: atomic {
           private_buffer[me] == NONE ->
#if DEATHS
           assert_one_is_free();
#endif
           if
           :: unheld(0)
           :: unheld(1)
           :: unheld(2)
           :: unheld(3)
#if DEATHS || CREW
           :: unheld(4)
           :: unheld(5)
#endif
#if CREW
           :: unheld(6)
#endif
           fi;
           owner = owners[buffer]
       }
       try_claim(chunk)
    :: atomic {
           private_buffer[me] != NONE ->
           if
           :: MUTANT != NO_CHUNK -> hold(owner_generation(owners[private_buffer[me]]), chunk)
           :: else
           fi;
           break
       }
    od
}

/* release in buffers.c; one step, as no one else changes the owner word of what is held */
inline release(b, holder) {
    if
    :: owner_holder(owners[b]) == holder ->
       owners[b] = owner_make(owner_generation(owners[b]), HOLDER_NOBODY, owner_chunk(owners[b]))
    :: else
    fi
}

/* pass in apply.c */
inline pass(chunk) {
    if
    :: atomic {
           words[chunk] == word || MUTANT == NO_COMPARE ->
           assert(word_version(words[chunk]) == word_version(word));
           words[chunk] = word_make(word_version(word) + 1, word_buffer(word))
       }
    :: else
    fi
}

/* apply_pinned in apply.c, with buffer_published of buffers.c. The update ends with the CAS. */
inline apply_pinned(chunk) {
    buffer_claim(chunk);
    if
    :: atomic {
           words[chunk] == word || MUTANT == NO_COMPARE ->
           assert(word_version(words[chunk]) == word_version(word));
           assert(holds[private_buffer[me]] == WRITTEN_BY(me));
           assert(is_whole(word));
           holds[private_buffer[me]] = word_version(word) + 1;
           words[chunk] = word_make(word_version(word) + 1, private_buffer[me])
       }
       d_step { release(private_buffer[me], holder_of(me)); private_buffer[me] = NONE }
    :: else
    fi
}

/* apply in apply.c */
inline apply(chunk) {
    chunk_pin(chunk);
    if
    :: word_version(word) < version && !passes(word_version(word) + 1) -> apply_pinned(chunk)
    :: word_version(word) < version && passes(word_version(word) + 1) -> pass(chunk)
    :: else
    fi;
    chunk_unpin()
}

/* chunks_follow in apply.c, with chunk_advance */
inline chunks_follow() {
    do
    :: atomic {
           word_version(words[chunk]) >= version ->
           chunk++;
           if
           :: chunk == CHUNKS -> chunk = 0; version = 0; break
           :: else
           fi
       }
    :: word_version(words[chunk]) < version -> apply(chunk)
    od
}

#if CREW
/* follow_taken in apply.c */
inline follow_taken() {
    do
    :: atomic { taken < CHUNKS -> chunk = taken; taken++ }
       do
       :: atomic { word_version(words[chunk]) >= version -> chunk = 0; break }
       :: word_version(words[chunk]) < version -> apply(chunk)
       od
    :: taken >= CHUNKS -> break
    od
}

/* crew_work in crew.c, of chunks_follow */
inline crew_follow() {
    d_step { taken = 0; goal = version; working = true } /* the bell comes last */
    follow_taken();
    atomic {
        !working || MUTANT == NO_WAIT ->
        assert(word_version(words[0]) >= version && word_version(words[CHUNKS - 1]) >= version);
        version = 0
    }
}

/* serve in crew.c */
proctype hand(byte me) {
    byte version, chunk, word, buffer, slot;
    short owner;
    {
end:    do
        :: atomic { working -> version = goal }
           follow_taken();
           atomic { working = false; version = 0 }
        od
    } unless { atomic { dead == 0 -> version = 0; chunk = 0; word = 0; buffer = 0; slot = 0; owner = 0 } }
}

/* slots_release_dead in slots.c, of the thread's: it may come before its worker's is reclaimed, or after that */
inline release_hand() {
    chunk_hazard[HAND] = 0;
    d_step {
        for (slot : 0 .. BUFFERS - 1) {
            if
            :: MUTANT != NO_HAND -> release(slot, holder_of(HAND))
            :: else
            fi
        }
        slot = 0
    }
}
#endif

inline follow() {
#if CREW
    if
    :: me == 0 -> crew_follow()
    :: else -> chunks_follow()
    fi
#else
    chunks_follow()
#endif
}

/* reclaim in reap.c. At most one buffer is the dead one's: to let go of it is one step. */
inline reclaim() {
    version = (MUTANT == NO_COMPLETION -> 0 : admitted);
    follow();
    chunk_hazard[dead] = 0;
    d_step {
        for (slot : 0 .. BUFFERS - 1) {
            if
            :: MUTANT != NO_RELEASE -> release(slot, holder_of(dead))
            :: else
            fi
        }
        slot = 0
    }
}

/* bring_spares in participant.c */
inline bring_spares() {
    d_step {
        for (slot : 0 .. BUFFERS - 1) {
            if
            :: JOINERS_SPARE(slot) -> owners[slot] = owner_make(0, HOLDER_NOBODY, NONE)
            :: else
            fi
        }
        slot = 0
    }
}

/* take_over in participant.c: of the joiner, before its first push */
inline take_over() {
    if
    :: me == 1 ->
       if
       :: MUTANT != HELP_FIRST -> bring_spares()
       :: else
       fi;
       d_step { version = admitted }
       chunks_follow();
       if
       :: MUTANT == HELP_FIRST -> bring_spares()
       :: else
       fi
    :: else
    fi
}

/* pyps_push in push.c, and reap_dead in reap.c */
proctype worker(byte me) {
    byte version, chunk, word, buffer, slot;
#if DEATHS
    byte found;
#endif
    short owner;
    {
#if DEATHS
        take_over();
#endif
end:    do
        :: d_step { admitted < PUSHES -> admitted++; version = admitted }
           follow()
        :: d_step { dead != NONE && !locked && !DEATHS -> locked = true }
           reclaim()
#if CREW
        :: d_step { dead == 0 && !hand_locked -> hand_locked = true }
           release_hand()
#endif
        od
    } unless {
        atomic {
            kill?eval(me) -> dead = me;
            version = 0; chunk = 0; word = 0; buffer = 0; slot = 0; owner = 0;
            private_buffer[me] = NONE;
#if CREW
            if
            :: me == 0 -> private_buffer[HAND] = NONE
            :: else
            fi
#endif
        }
    }
}

/* pyps_pull in pull.c */
proctype observer(byte me) {
    byte chunk, word;
    {
        do
        :: chunk == CHUNKS -> break
        :: chunk < CHUNKS ->
           chunk_pin(chunk);
           chunk_unpin();
           chunk++
        od
    } unless { atomic { kill?eval(me) -> dead = me; chunk = 0; word = 0 } }
}

/* When no process can take a step any more, every admitted push is in every chunk once, nothing is pinned, and
 * each buffer is its living holder's, or its chunk's, or free. */
inline check_end() {
#if DEATHS
    skip /* what the dead held stays so */
#else
    d_step {
        for (i : 0 .. SLOTS - 1) {
            assert(chunk_hazard[i] == 0)
        }
        for (i : 0 .. CHUNKS - 1) {
            assert(word_version(words[i]) == admitted);
            assert(is_whole(words[i]));
            assert(owner_holder(owners[word_buffer(words[i])]) == HOLDER_NOBODY)
        }
        for (i : 0 .. BUFFERS - 1) {
            assert(owner_holder(owners[i]) == HOLDER_NOBODY ||
                   private_buffer[(owner_holder(owners[i]) - 1) % HOLDERS] == i)
        }
    }
#endif
}

init {
    byte i;
    d_step {
        for (i : 0 .. BUFFERS - 1) {
            if
            :: i < CHUNKS -> words[i % CHUNKS] = word_make(0, i); owners[i] = owner_make(0, HOLDER_NOBODY, i)
            :: i >= CHUNKS && JOINERS_SPARE(i) -> owners[i] = owner_make(0, HOLDER_ABSENT, NONE); holds[i] = WRITTEN_BY(NONE)
            :: else -> owners[i] = owner_make(0, HOLDER_NOBODY, NONE); holds[i] = WRITTEN_BY(NONE)
            fi
        }
        private_buffer[0] = NONE;
        private_buffer[1] = NONE;
#if CREW
        private_buffer[HAND] = NONE
#endif
    }
    atomic {
        run worker(0);
        run worker(1);
#if CREW
        run hand((MUTANT == ONE_SLOT -> 0 : HAND))
#else
        run observer(2);
#if !DEATHS
        run observer(3)
#endif
#endif
    }
#if DEATHS
    if
    :: kill!1
    :: true
    fi;
#if DEATHS > 1
    if
    :: kill!2
    :: true
    fi;
#endif
#else
    if /* one of each kind is enough: the two are alike, but for the thread of one */
    :: kill!0
#if CREW
    :: kill!1
#else
    :: kill!2
#endif
    :: MUTANT == STOPPED -> dead = 2
    :: true
    fi;
#endif
    timeout;
    check_end()
}
