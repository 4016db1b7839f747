"""Wrong changes of near tiers, of rejoining, of leases, of encoded roots, and of peers."""

from __future__ import annotations

from tests.mutants.edit import Mutant

_LEASES = "ckpt/commit/leases.py"
_PARITY = "ckpt/near/parity.py"
_RECOVERY = "ckpt/near/recovery.py"
_SAVING = "ckpt/near/saving.py"
_TIER = "ckpt/near/tier.py"
_CHECKPOINTER = "ckpt/service/checkpointer.py"
_REJOINING = "ckpt/service/parts.py"
_ENCODING = "storage/encoding/store.py"
_LAYOUT = "storage/encoding/layout.py"
_SERVER = "storage/peers/server.py"

NEAR = (
    Mutant(
        "bytes of an older part stand behind the end of a chunk",
        _PARITY,
        "    target[done:] = bytes(len(target) - done)\n",
        "",
        test="tests/near/test_parity.py::test_each_lost_host_comes_back_byte_for_byte",
    ),
    Mutant(
        "a host that keeps a part of its parity alone rebuilds files",
        _PARITY,
        "return own if follows and stops[-1] == group.parity_nbytes(keeper) else []",
        "return own",
        test="tests/near/test_parity.py::test_a_host_without_all_of_its_parity_rebuilds_nothing",
    ),
    Mutant(
        "what changed on its way becomes parity",
        "storage/peers/store.py",
        "or answer.read(CHECKSUM.size) != checksum_of(views):",
        "or not answer.read(CHECKSUM.size):",
        test="tests/near/test_parity_jobs.py"
        "::test_bytes_that_change_on_their_way_are_fetched_again",
    ),
    Mutant(
        "a damaged rank makes one forget the hosts that are rebuilt",
        _RECOVERY,
        "if (home, rank) not in bad and rank not in rebuilt]",
        "if (home, rank) not in bad]",
        test="tests/near/test_parity_jobs.py"
        "::test_a_lost_host_and_damage_in_another_group_are_rebuilt",
    ),
    Mutant(
        "a near state of a fenced job is restored",
        _RECOVERY,
        "in tier.records(epoch):",
        "in tier.records():",
        test="tests/near/test_near_training.py::test_a_state_of_a_fenced_job_is_never_used",
    ),
    Mutant(
        "near states are overwritten before it is known whose they are",
        _SAVING,
        "        self.tier.refuse_fenced(self.session.epoch)\n        mapped.recycle",
        "        mapped.recycle",
        test="tests/near/test_near_training.py"
        "::test_a_superseded_job_leaves_alone_what_it_does_not_know_that_it_recorded",
    ),
    Mutant(
        "a superseded job drops older near states before it knows that it is one",
        _SAVING,
        "        self.tier.refuse_fenced(self.session.epoch)\n        self._drop",
        "        self._drop",
        test="tests/near/test_near_training.py"
        "::test_a_superseded_job_leaves_alone_what_it_does_not_know_that_it_recorded",
    ),
    Mutant(
        "what a job before has left in memory is not dropped in time",
        _SAVING,
        "        if self._kept is None or not self._kept <= known:\n",
        "        if self._kept is None:\n",
        test="tests/near/test_near_training.py"
        "::test_a_tier_with_room_for_two_states_is_enough_after_a_restart",
    ),
    Mutant(
        "a block is sent to another host unchecked",
        "ckpt/loading/reader.py",
        "        for group in self._groups(rows):\n            start, stop",
        "        for group in ():\n            start, stop",
        test="tests/near/test_bytes_received.py::test_damage_is_found_by_whoever_has_the_file",
    ),
    Mutant(
        "ranks of a host do not pass on to each other what it lacks",
        _RECOVERY,
        "Origins(ranks_here, owners)",
        "Origins([world.rank], owners)",
        test="tests/near/test_bytes_received.py::test_a_host_receives_what_it_lacks",
    ),
    Mutant(
        "parts of blocks are put where other bytes are already",
        "ckpt/loading/reader.py",
        "        if len(pieces) > 1 and length(wanted) == len(data):\n",
        "        if len(pieces) > 1:\n",
        test="tests/near/test_bytes_received.py::test_a_host_receives_what_it_lacks",
    ),
    Mutant(
        "the near state before is dropped before the new record is everywhere",
        _SAVING,
        "        self._drop({self._safe, header.attempt})",
        "        self._drop({header.attempt})",
        test="tests/near/test_near_training.py"
        "::test_a_near_state_stays_until_the_next_is_recorded_on_every_host",
    ),
    Mutant(
        "the memory of the newest near state is taken for the next one",
        _SAVING,
        "        mapped.recycle({self._safe})",
        "        mapped.recycle(())",
        test="tests/near/test_near_training.py"
        "::test_a_near_state_stays_until_the_next_is_recorded_on_every_host",
    ),
    Mutant(
        "near saves are allowed where one generation fits",
        _SAVING,
        "            if taken > limit:",
        "            if kept[name] > limit:",
        test="tests/near/test_near_training.py"
        "::test_room_for_two_generations_is_enough_and_a_byte_less_is_not",
    ),
    Mutant(
        "a restored near state is not recorded under the new epoch",
        _SAVING,
        "        if head.epoch != self.session.epoch:\n",
        "        if False:\n",
        test="tests/near/test_near_training.py"
        "::test_a_near_state_that_was_restored_is_restored_again",
    ),
    Mutant(
        "near states from before stay when a training goes back",
        _SAVING,
        "                self.tier.forget(kept, epoch=self.session.epoch)\n",
        "                pass\n",
        test="tests/near/test_near_training.py::test_going_back_ends_the_near_states_from_before",
    ),
    Mutant(
        "a rank that loses another removes what hosts may have recorded",
        _SAVING,
        "            if is_written and (is_fenced or world.failure is not None):",
        "            if is_written and is_fenced:",
        test="tests/near/test_near_kills.py"
        "::test_a_rank_that_loses_another_keeps_what_hosts_may_have_recorded",
    ),
    Mutant(
        "any higher step is newer than a near state",
        "ckpt/near/records.py",
        "return slot > self.after_slot and step > self.step",
        "return step > self.step",
        test="tests/near/test_near_training.py::test_going_back_counts_as_newer_than_what_was_left",
    ),
    Mutant(
        "the seal of a near file is not compared",
        _TIER,
        "        return seal_of(files.get(prefix + file.name, table)) == file.seal\n",
        "        return bool(files.get(prefix + file.name, table))\n",
        test="tests/near/test_records.py::test_a_file_of_another_length_or_seal_does_not_count",
    ),
    Mutant(
        "records of a newer session are dropped",
        _TIER,
        "            if match is None or int(match[1]) > epoch:\n",
        "            if match is None:\n",
        test="tests/near/test_records.py::test_a_tier_leaves_alone_what_a_newer_session_has",
    ),
    Mutant(
        "files of a newer session are dropped",
        _TIER,
        "            if attempt_epoch(attempt) <= epoch:\n",
        "            if True:\n",
        test="tests/near/test_records.py::test_a_tier_leaves_alone_what_a_newer_session_has",
    ),
    Mutant(
        "the record of another root counts in a tier",
        _TIER,
        "if near_key(record) == key and record.head.root == self.root:",
        "if True:",
        test="tests/near/test_records.py::test_damaged_and_foreign_objects_in_a_tier_do_no_harm",
    ),
    Mutant(
        "copies of near files are not made",
        _SAVING,
        "        if copies is None:\n",
        "        if True:\n",
        test="tests/near/test_replicas.py::test_a_lost_host_costs_no_near_checkpoint",
    ),
    Mutant(
        "the room that copies take is forgotten",
        _SAVING,
        "                kept[other] += own[name]\n",
        "                pass\n",
        test="tests/near/test_replicas.py::test_the_room_check_counts_copies",
    ),
    Mutant(
        "copies lie in the rack of their host",
        "ckpt/near/placement.py",
        "    order = _by_rack(racks)\n",
        "    order = list(racks)\n",
        test="tests/near/test_placement.py"
        "::test_racks_are_not_shared_wherever_a_balanced_placement_allows_it",
    ),
)

REJOINING = (
    Mutant(
        "a new world does not claim the root",
        _CHECKPOINTER,
        "        # All sessions of the old world are fenced from here on.\n"
        "        target.ranked_session()\n",
        "",
        test="tests/service/test_rejoin.py::test_what_the_old_world_still_writes_is_fenced",
    ),
    Mutant(
        "half a state goes on where nothing was saved",
        _CHECKPOINTER,
        "        if report is None and state is None:\n",
        "        if False:\n",
        test="tests/service/test_rejoin.py::test_without_a_checkpoint_a_new_state_is_needed",
    ),
    Mutant(
        "ranks do not wait for each other before they rejoin",
        _CHECKPOINTER,
        "        meet(process_group, seconds_max=meet_seconds_max)\n",
        "",
        test="tests/service/test_rejoin.py::test_who_does_not_come_is_named",
    ),
    Mutant(
        "saves of the world before are not given up",
        "ckpt/service/parts.py",
        "        self._end_world(failure)\n",
        "",
        test="tests/service/test_rejoin.py::test_saves_of_the_world_before_are_given_up",
    ),
    Mutant(
        "a process outside of the group rejoins",
        _REJOINING,
        "    if is_joined and dist.get_rank(process_group) < 0:\n",
        "    if False:\n",
        test="tests/service/test_rejoin.py::test_a_process_outside_of_the_group_stays_in_its_world",
    ),
)

ENDING = (
    Mutant(
        "a job that was stopped while another one took over counts its near state",
        _SAVING,
        "                self.tier.refuse_fenced(self.session.epoch)\n            return made",
        "            return made",
        test="tests/near/test_fenced.py::test_a_job_that_was_stopped_counts_no_state_any_more",
    ),
    Mutant(
        "a superseded job removes the near state that its successor goes on from",
        _SAVING,
        "            if is_fenced:\n                raise",
        "            if False:\n                raise",
        test="tests/near/test_near_training.py"
        "::test_a_superseded_job_leaves_alone_what_it_does_not_know_that_it_recorded",
    ),
    Mutant(
        "a superseded job removes what it recorded and its successor goes on from",
        _SAVING,
        "            if is_written and (is_fenced or world.failure is not None):",
        "            if is_written and world.failure is not None:",
        test="tests/near/test_fenced.py::test_a_state_that_another_job_goes_on_from_is_not_removed",
    ),
    Mutant(
        "a training that fails waits for a near save that another rank holds up",
        _CHECKPOINTER,
        '            self._near.leave(RankFailed(why, rank=rank, phase="training"))\n',
        "            pass\n",
        test="tests/near/test_abandoned.py"
        "::test_a_failed_training_gives_up_a_near_save_that_another_rank_holds_up",
    ),
)

LEASES = (
    Mutant(
        "a lease from the future keeps for years",
        _LEASES,
        "end = min(info.modified_unix, now_unix) + seconds",
        "end = info.modified_unix + seconds",
        test="tests/service/test_follower.py"
        "::test_leases_end_by_themselves_and_none_keeps_anything_for_years",
    ),
    Mutant(
        "a lease may be of any length",
        _LEASES,
        "seconds = min(int(match[2]), LEASE_SECONDS_MAX)",
        "seconds = int(match[2])",
        test="tests/service/test_follower.py"
        "::test_leases_end_by_themselves_and_none_keeps_anything_for_years",
    ),
    Mutant(
        "leases do not end",
        _LEASES,
        "        if end <= now_unix:\n",
        "        if False:\n",
        test="tests/service/test_follower.py"
        "::test_leases_end_by_themselves_and_none_keeps_anything_for_years",
    ),
    Mutant(
        "retention asks for no leases",
        "ckpt/service/keeping.py",
        "leases=lambda: leases_of(session.store, now_unix=time.time()),",
        "leases=lambda: {},",
        test="tests/service/test_follower.py::test_what_is_read_is_leased_and_retention_leaves_it",
    ),
    Mutant(
        "who may not write cannot follow",
        _LEASES,
        'logger.info("%s: reading %s without a lease: %s", store.url, attempt, error)',
        "raise",
        test="tests/service/test_follower.py::test_who_may_only_read_follows_without_a_lease",
    ),
)

ENCODING = (
    Mutant(
        "an object that is only compressed is read in an encrypted root",
        _ENCODING,
        "        if footer.key_id != expected:\n",
        "        if False:\n",
        equivalent="The index of the object is opened with the key of the root, whatever its "
        "footer says, and has no tag that was made with it. The check is for the error's text.",
    ),
    Mutant(
        "objects can be exchanged for each other",
        _ENCODING,
        "        is_right = name == self._name(key)\n",
        "        is_right = True\n",
        test="tests/e2e/test_encoded_roots.py::test_a_step_in_place_of_another_is_refused",
    ),
    Mutant(
        "all objects are encrypted with one salt",
        _LAYOUT,
        "self._salt = bytes(SALT_NBYTES) if codec.secret is None else os.urandom(SALT_NBYTES)",
        "self._salt = bytes(SALT_NBYTES)",
        test="tests/storage/test_encoding.py::test_the_same_object_is_never_encrypted_alike",
    ),
    Mutant(
        "FORMAT of an encrypted root is believed",
        _ENCODING,
        "            check_root(codec.secret, stored, self._where(FORMAT_KEY))\n",
        "            pass\n",
        test="tests/storage/test_encoding.py::test_format_is_authenticated",
    ),
    Mutant(
        "a frame may say that it holds more than a block",
        "storage/encoding/blocks.py",
        "            if self._zstd.get_frame_parameters(packed).content_size != nbytes:\n"
        "                raise BadTag\n",
        "",
        test="tests/storage/test_encoding.py"
        "::test_a_frame_that_declares_more_than_a_block_is_not_unpacked",
    ),
    Mutant(
        "options that ask for encryption write into a plain root",
        _ENCODING,
        "        if encoding is None and self._wants_encoding:\n",
        "        if False:\n",
        test="tests/storage/test_encoding.py::test_options_that_do_not_fit_the_root_are_refused",
    ),
    Mutant(
        "the index of an object that another process has removed is used for the next one",
        _ENCODING,
        "            self._forget(key)\n            self.inner.put_if_absent",
        "            self.inner.put_if_absent",
        test="tests/storage/test_encoding.py"
        "::test_an_object_made_anew_is_not_read_by_the_old_index",
    ),
    Mutant(
        "the index of an object that was deleted is used for the next one",
        _ENCODING,
        "        self._forget(key)\n        # Without FORMAT",
        "        # Without FORMAT",
        test="tests/storage/test_encoding.py"
        "::test_an_object_made_anew_is_not_read_by_the_old_index",
    ),
)

PEERS = (
    Mutant(
        "blocks that were damaged on their way are taken",
        "storage/peers/store.py",
        "    if _exactly(answer, CHECKSUM.size, until) != checksum_of([memoryview(data)]):\n",
        "    if not _exactly(answer, CHECKSUM.size, until):\n",
        test="tests/storage/test_relay.py"
        "::test_bytes_that_are_damaged_on_their_way_are_asked_for_again",
    ),
    Mutant(
        "blocks of another length than their names say are kept",
        "storage/peers/relay.py",
        "                if part.start % BLOCK_NBYTES or part.start + len(part.data) != end:\n",
        "                if part.start % BLOCK_NBYTES:\n",
        test="tests/storage/test_relay.py::test_a_relay_keeps_no_bytes_that_do_not_fit_their_names",
    ),
    Mutant(
        "a host that is behind takes back what is known",
        "storage/peers/relay.py",
        "                if is_behind and now - self._heard < BEHIND_SECONDS:\n",
        "                if False:\n",
        test="tests/storage/test_relay.py::test_a_parent_that_is_behind_takes_nothing_back",
    ),
    Mutant(
        "a peer takes bytes that were damaged on their way",
        _SERVER,
        "        if checksum_of([data]) != checksum:\n",
        "        if False:\n",
        test="tests/storage/test_peers.py::test_a_part_that_is_damaged_on_its_way_is_not_taken",
    ),
    Mutant(
        "a peer serves whoever asks",
        _SERVER,
        "if len(given) != 1 or not self.server.is_known(given[0]):",
        "if False:",
        test="tests/storage/test_peers.py::test_without_the_token_there_is_nothing",
    ),
    Mutant(
        "another part under the same number is taken for a repetition",
        _SERVER,
        "            if self.checksums.get(index) != checksum:\n",
        "            if index not in self.checksums:\n",
        test="tests/storage/test_peers.py::test_the_same_part_twice_is_one_part_and_another_is_refused",
    ),
    Mutant(
        "an upload whose end was answered in vain has failed",
        "storage/peers/store.py",
        "            return sent > 1 and store.info(ledger.key).nbytes == ledger.nbytes\n",
        "            return False\n",
        test="tests/storage/test_peers.py::test_the_lost_answer_of_an_end_is_looked_up",
    ),
    Mutant(
        "a name leads out of the directory",
        _SERVER,
        'check_key(unquote(path[len(OBJECTS) :], errors="strict"))',
        'unquote(path[len(OBJECTS) :], errors="strict")',
        test="tests/storage/test_peers.py::test_no_name_leads_out_of_the_directory",
    ),
    Mutant(
        "a body of any length is read",
        _SERVER,
        "        if not CHECKSUM.size <= nbytes <= nbytes_max + CHECKSUM.size:\n",
        "        if nbytes < CHECKSUM.size:\n",
        test="tests/storage/test_peers.py::test_bodies_are_bounded_before_they_are_read",
    ),
    Mutant(
        "any number of uploads may be under way",
        _SERVER,
        "            if len(self._uploads) >= UPLOADS_MAX:\n",
        "            if False:\n",
        test="tests/storage/test_peers.py::test_uploads_are_bounded",
    ),
    Mutant(
        "ranks accept any token",
        "ckpt/world/heart.py",
        "        if greet is None or not secrets.compare_digest(\n"
        "            frame.name.encode(), self.card.token.encode()\n"
        "        ):\n",
        "        if greet is None:\n",
        test="tests/protocol/test_broken_connections.py::test_a_stranger_is_no_rank",
    ),
    Mutant(
        "no time bound on a peer's body",
        _SERVER,
        "        self.server.allow(self.connection, HEAD_SECONDS + nbytes / RATE_MIN)\n",
        "",
        test="tests/storage/test_peers.py::test_a_body_that_does_not_come_ends",
    ),
    Mutant(
        "strangers of one address take all the room",
        "storage/strangers.py",
        "    if counts[address] < most_of_one:\n",
        "    if True:\n",
        test="tests/storage/test_peers.py::test_strangers_take_no_room_of_ranks",
    ),
    Mutant(
        "a flood ends those who came before it",
        "storage/strangers.py",
        "counts.most_common(1)[0][0]",
        "next(iter(strangers.values()))",
        test="tests/protocol/test_broken_connections.py::test_strangers_of_one_address_end_no_rank",
    ),
    Mutant(
        "holders of the token count as strangers",
        _SERVER,
        "        self.server.trust(self.connection)\n",
        "",
        test="tests/storage/test_peers.py::test_who_has_shown_the_token_is_no_stranger",
    ),
    Mutant(
        "any number of connections have shown the token",
        _SERVER,
        "_add(self._known, connection, address, KNOWN_MAX, KNOWN_PER_ADDRESS)",
        "self._known[connection] = address",
        test="tests/storage/test_peers.py::test_connections_of_those_with_the_token_are_bounded",
    ),
    Mutant(
        "half requests of one address take all the room",
        "ckpt/screens/serve_http.py",
        "to_end(self._half, address, HALF_MAX, HALF_PER_ADDRESS)",
        "next(iter(self._half)) if len(self._half) >= HALF_MAX else None",
        test="tests/tools/test_serving.py::test_half_requests_are_few_and_end",
    ),
    Mutant(
        "what a sender leaves behind stays",
        _SERVER,
        "if now > u.touched + UPLOAD_SECONDS]",
        "if False]",
        test="tests/storage/test_peers.py::test_what_a_sender_leaves_is_given_up",
    ),
)

ALL = (*NEAR, *REJOINING, *ENDING, *LEASES, *ENCODING, *PEERS)
