"""Wrong changes of what claims, appends, commits, fences and reads the log."""

from __future__ import annotations

from tests.mutants.edit import Mutant

_APPENDER = "ckpt/commit/appender.py"
_CLAIM = "ckpt/commit/writer.py"
_LIVE = "ckpt/commit/live.py"
_LOCATE = "ckpt/commit/locate.py"
_LOG = "ckpt/commit/log.py"
_RECORDS = "ckpt/commit/records.py"
_SEGMENTS = "ckpt/commit/live.py"
_SESSION = "ckpt/commit/session.py"

RECORDS = (
    Mutant(
        "a record says another slot than it stands in",
        _RECORDS,
        "    if record.slot != slot:\n",
        "    if False:\n",
        test="tests/protocol/test_log.py::test_a_record_does_what_its_kind_says",
    ),
    Mutant(
        "a record in other bytes than a writer makes is read",
        _RECORDS,
        "if encode_record(record) != data:",
        "if False:",
        test="tests/protocol/test_log.py::test_bytes_that_are_not_canonical_are_refused",
    ),
    Mutant(
        "records do not keep the digest of the one before",
        _RECORDS,
        '        body["previous"] = record.previous\n',
        "        pass\n",
        test="tests/protocol/test_log.py::test_each_record_has_the_digest_of_the_one_before",
    ),
    Mutant(
        "a live checkpoint may be of a later epoch than the record",
        _RECORDS,
        "if attempt_epoch(entry.attempt) > record.epoch:",
        "if False:",
        test="tests/protocol/test_log.py::test_record_that_makes_no_sense_is_refused",
    ),
    Mutant(
        "a record may name references that are not live",
        _RECORDS,
        "missing = [] if record.segments else [",
        "missing = [] if True else [",
        test="tests/protocol/test_log.py::test_live_entry_that_makes_no_sense_is_refused",
    ),
    Mutant(
        "a RETIRE may leave its checkpoint live",
        _RECORDS,
        'if record.kind == "RETIRE" and own:',
        "if False:",
        test="tests/protocol/test_log.py::test_a_record_does_what_its_kind_says",
    ),
    Mutant(
        "a record other than a COMMIT may bring a checkpoint to life",
        _RECORDS,
        "    if at_slot:\n",
        "    if False:\n",
        test="tests/protocol/test_log.py::test_a_record_does_what_its_kind_says",
    ),
)

READING = (
    Mutant(
        "a record counts although it builds on another one than is before it",
        _LOG,
        "if before is not None and record_digest(before) != record.previous:",
        "if False:",
        test="tests/protocol/test_places.py::test_a_record_sent_into_another_log_is_refused_by_all",
    ),
    Mutant(
        "a hole in the log is not seen",
        _LOG,
        "                if not self.store.exists(record_key(expected)):\n",
        "                if False:\n",
        test="tests/protocol/test_log.py::test_a_hole_is_seen_in_few_requests",
    ),
    Mutant(
        "a lost CLAIM at the end of the log is not seen",
        _LOG,
        "        if max(epochs) > state.epoch:\n",
        "        if False:\n",
        test="tests/protocol/test_lost_records.py::test_one_checkpoint_tells_of_a_lost_log",
    ),
    Mutant(
        "lost records at the end of the log are not seen",
        _LOG,
        "return {name: one for name, one in attempts.items() if counts[attempt_epoch(name)] > 1}",
        "return {}",
        test="tests/protocol/test_lost_records.py::test_every_loss_is_reported_and_mended",
    ),
    Mutant(
        "a claim does not compare the links of the log",
        _LOG,
        "        for _ in self.last_records():\n            pass\n",
        "",
        test="tests/protocol/test_places.py::test_a_claim_compares_more_links_than_a_reader",
    ),
    Mutant(
        "what was mended counts as lost",
        _LOG,
        "            if record.write_id.startswith(MENDED):  #",
        "            if False:  #",
        test="tests/protocol/test_lost_records.py::test_what_mend_could_not_bring_back_is_refused_no_longer",
    ),
    Mutant(
        "the memory of a log goes back to an older record",
        _LOG,
        "if self._end is None or end.slot > self._end.slot:",
        "if True:",
        test="tests/protocol/test_places.py::test_the_memory_of_a_log_never_goes_back",
    ),
    Mutant(
        "a training resumes from an import that is newer",
        _LOG,
        "of_a_line = (entry for entry in self.newest_first() if entry.line is not None)",
        "of_a_line = (entry for entry in self.newest_first())",
        test="tests/protocol/test_lines.py::test_import_into_a_training_never_becomes_what_it_resumes",
    ),
    Mutant(
        "a record of any size is read",
        _LOG,
        "answers.append(self.store.get_bounded(key, RECORD_NBYTES_MAX))",
        "answers.append(self.store.get(key))",
        test="tests/protocol/test_session.py::test_a_taken_slot_that_cannot_be_read_stays_unsettled",
    ),
    Mutant(
        "a record is requested once, whatever comes",
        _LOG,
        "            once_more(read, self.store)\n",
        "            read()\n",
        test="tests/e2e/test_flips_on_the_way.py::"
        "test_a_record_or_format_flipped_on_its_way_is_read_again",
    ),
    Mutant(
        "a manifest that is not the committed one is read",
        _LOCATE,
        "if manifest_digest(data) != entry.manifest_digest:",
        "if False:",
        test="tests/protocol/test_locate.py::test_a_manifest_that_is_not_the_committed_one_is_refused",
    ),
    Mutant(
        "a checkpoint that was retired meanwhile counts as damaged",
        _LOCATE,
        "if entry not in live_entries(store):",
        "if False:",
        test="tests/protocol/test_locate.py::test_a_checkpoint_that_is_retired_between_two_looks_is_not_damaged",
    ),
)

LIVE_SETS = (
    Mutant(
        "a COMMIT drops the pins of others",
        _LIVE,
        "        insort(listed, entry, key=_slot)\n",
        "        listed = [replace(other, pinned=False) for other in listed]\n"
        "        insort(listed, entry, key=_slot)\n",
        test="tests/protocol/test_live.py::test_any_commits_marks_and_retirements_leave_what_they_say",
    ),
    Mutant(
        "a changed entry of a segment is there twice",
        _LIVE,
        "            gone = tuple(sorted({*gone, entry.slot}))\n",
        "            pass\n",
        test="tests/protocol/test_live.py::test_any_commits_marks_and_retirements_leave_what_they_say",
    ),
    Mutant(
        "what was retired of a segment stays live",
        _LIVE,
        "return replace(self, gone=tuple(sorted({*self.gone, entry.slot})))",
        "return self",
        test="tests/protocol/test_live.py::test_any_commits_marks_and_retirements_leave_what_they_say",
    ),
    Mutant(
        "what was retired of a segment is found",
        _LIVE,
        "return None if there.slot in self.gone else there",
        "return there",
        test="tests/protocol/test_live.py::test_any_commits_marks_and_retirements_leave_what_they_say",
    ),
    Mutant(
        "users in segments are not looked for",
        _LIVE,
        "            if ref.last_slot > after:\n",
        "            if False:\n",
        test="tests/protocol/test_live.py::test_any_commits_marks_and_retirements_leave_what_they_say",
    ),
    Mutant(
        "a changed entry is lost when the live set is folded",
        _LIVE,
        "        kept += [entry for entry in run if entry.slot in gone]\n",
        "",
        test="tests/protocol/test_live.py::test_any_commits_marks_and_retirements_leave_what_they_say",
    ),
    Mutant(
        "a record names a segment that was not written",
        _LIVE,
        "        write(ref, data)\n",
        "",
        test="tests/protocol/test_live.py::test_any_commits_marks_and_retirements_leave_what_they_say",
    ),
    Mutant(
        "a damaged segment is read",
        _SEGMENTS,
        "if hashlib.sha256(data).digest() != ref.digest:",
        "if False:",
        test="tests/protocol/test_live.py::test_a_segment_that_is_not_what_the_record_says_is_named",
    ),
)

APPENDS = (
    Mutant(
        "an append does not wait for the outcome of the one before",
        _APPENDER,
        "        self.settle()\n        for _ in range(self.sources.races_max):",
        "        for _ in range(self.sources.races_max):",
        equivalent=(
            "LogWriter settles before every append, and nothing else is pending when a commit "
            "is taken back"
        ),
    ),
    Mutant(
        "an append does not prove that the log is still the one it knows",
        _APPENDER,
        "            self.prove()\n",
        "",
        test="tests/protocol/test_places.py::test_a_session_of_the_same_epoch_in_a_restored_root_is_not_taken_for_our_own",
    ),
    Mutant(
        "a record without an answer counts as refused",
        _APPENDER,
        "        if not maybe_sent:\n",
        "        if True:\n",
        test="tests/protocol/test_session.py::test_unanswered_commit_is_unknown_until_the_same_slot_answers",
    ),
    Mutant(
        "a record is noted as pending only after it was sent",
        _APPENDER,
        "        self._pending = record\n        cause: StorageError",
        "        cause: StorageError",
        test="tests/protocol/test_session.py::test_interrupted_write_stays_unsettled",
    ),
    Mutant(
        "a pending record that gets no answer again counts as never sent",
        _APPENDER,
        "        maybe_sent = sent_before\n",
        "        maybe_sent = False\n",
        test="tests/protocol/test_session.py::test_an_unanswered_commit_stays_unsettled_while_the_store_refuses",
    ),
    Mutant(
        "another's record in the slot is taken for one's own",
        _APPENDER,
        "        if occupant == data:\n",
        "        if True:\n",
        test="tests/protocol/test_session.py::test_late_arrival_after_a_successors_claim_changes_nothing",
    ),
    Mutant(
        "one's own record in the slot is taken for another's",
        _APPENDER,
        "        if occupant == data:\n",
        "        if False:\n",
        test="tests/protocol/test_session.py::test_lost_reply_of_a_commit_is_a_success",
    ),
    Mutant(
        "a failed look at the slot is taken for a lost race",
        _APPENDER,
        "            occupant = self.log.raw(record.slot)\n"
        "        except StorageError as error:\n"
        "            raise self._unknown(record) from error\n",
        "            occupant = self.log.raw(record.slot)\n"
        "        except StorageError:\n"
        '            occupant = b""\n',
        test="tests/protocol/test_session.py::test_a_taken_slot_that_cannot_be_read_stays_unsettled",
    ),
    Mutant(
        "nobody looks whether the record stands where it was put",
        _APPENDER,
        "            is_there = self._is_in_place(record, data)\n            if is_there and",
        "            is_there = True\n            if is_there and",
        test="tests/protocol/test_places.py::test_a_mark_that_was_sent_into_a_restored_backup_is_not_acknowledged",
    ),
    Mutant(
        "nobody looks whether the record before is the one that it was made for",
        _APPENDER,
        "        if not self._fits(record):\n",
        "        if False:\n",
        test="tests/protocol/test_places.py::test_a_record_sent_into_another_log_is_refused_by_all",
    ),
    Mutant(
        "a COMMIT is acknowledged without its MANIFEST",
        _APPENDER,
        'if record.kind != "COMMIT":\n            return False\n        return not',
        "if True:\n            return False\n        return not",
        test="tests/protocol/test_places.py::test_a_commit_without_its_manifest_is_taken_back_by_its_own_process",
    ),
    Mutant(
        "a pending COMMIT is sent again without its MANIFEST",
        _APPENDER,
        "        if is_lost:\n            raise self._without_manifest(record)\n",
        "",
        test="tests/protocol/test_unsettled.py::test_a_commit_is_not_settled_where_a_restored_backup_took_its_manifest",
    ),
    Mutant(
        "a save begins although its record may be too large",
        _APPENDER,
        "len(encode_record(newest))) <= ROOM_NBYTES:",
        "len(encode_record(newest))) >= 0:",
        test="tests/protocol/test_live.py::test_a_log_without_room_refuses_a_save_before_its_data_is_written",
    ),
    Mutant(
        "a store that overwrites is not looked at first",
        _APPENDER,
        "if self._check_first and self.store.exists(key):",
        "if False:",
        test="tests/protocol/test_session.py::test_a_store_that_overwrites_does_not_overwrite_the_record_of_another",
    ),
    Mutant(
        "a commit that others need is taken back",
        _APPENDER,
        "if entry is None or state.entries.users_of(attempt, after=entry.slot):",
        "if entry is None:",
        test="tests/protocol/test_session.py::test_a_commit_that_others_refer_to_is_not_taken_back",
    ),
)

SESSIONS = (
    Mutant(
        "a claim keeps the epoch",
        _SESSION,
        'RecordDraft("CLAIM", state.epoch + 1)',
        'RecordDraft("CLAIM", max(state.epoch, 1))',
        test="tests/protocol/test_session.py::test_older_session_is_fenced_for_ever_and_deletes_nothing",
    ),
    Mutant(
        "a session is never fenced",
        _SESSION,
        "if self._fenced_by is None and state.epoch > self.epoch:",
        "if False:",
        test="tests/protocol/test_session.py::test_older_session_is_fenced_for_ever_and_deletes_nothing",
    ),
    Mutant(
        "a session does not see that its CLAIM is gone",
        _SESSION,
        "        if state.epoch < self.epoch:\n",
        "        if False:\n",
        test="tests/protocol/test_places.py::test_a_root_without_its_claim_or_its_format_is_not_the_one_that_was_claimed",
    ),
    Mutant(
        "a commit does not look whether its references are live",
        _SESSION,
        "            for name in commit.references:\n",
        "            for name in ():\n",
        test="tests/protocol/test_session.py::test_referenced_attempt_is_kept_and_a_retired_reference_drops_the_commit",
    ),
    Mutant(
        "what was given up can be committed",
        _SESSION,
        "if commit.attempt in self._given_up or attempt_epoch",
        "if attempt_epoch",
        test="tests/protocol/test_session.py::test_discarded_attempt_can_never_be_committed",
    ),
    Mutant(
        "an attempt of another session can be committed",
        _SESSION,
        "if commit.attempt in self._given_up or attempt_epoch(commit.attempt) != self.epoch:",
        "if commit.attempt in self._given_up:",
        test="tests/protocol/test_session.py::test_what_another_session_began_cannot_be_committed",
    ),
    Mutant(
        "a discard deletes what is live",
        _SESSION,
        "            refuse_needed(self.state(), attempt)\n",
        "",
        test="tests/protocol/test_session.py::test_discarded_attempt_can_never_be_committed "
        "tests/protocol/test_session.py::test_files_of_a_live_checkpoint_are_deleted_by_nobody",
    ),
    Mutant(
        "a discard deletes what may still be committed by another thread",
        _SESSION,
        "            self.give_up(attempt, step=step)\n            self.settle()\n",
        "            self.settle()\n",
        test="tests/protocol/test_session.py::test_discarded_attempt_can_never_be_committed",
    ),
    Mutant(
        "a discard does not wait for the outcome of its commit",
        _SESSION,
        "            self.give_up(attempt, step=step)\n            self.settle()\n",
        "            self.give_up(attempt, step=step)\n",
        test="tests/protocol/test_session.py::test_an_unanswered_commit_stays_unsettled_while_the_store_refuses",
    ),
    Mutant(
        "the sweep of failed attempts spares no live one",
        _SESSION,
        "for attempt in [name for name in self._leftovers if state.find(name) is not None]:",
        "for attempt in ():",
        test="tests/protocol/test_session.py::test_a_live_attempt_that_was_given_up_is_not_swept",
    ),
    Mutant(
        "a commit that was found not to stand can be sent again",
        _SESSION,
        'settled.record.kind == "COMMIT" and not settled.landed:',
        "False:",
        test="tests/protocol/test_session.py::test_a_commit_of_unknown_outcome_that_another_record_displaced_is_swept",
    ),
    Mutant(
        "a sweep takes attempts of the present epoch",
        _SESSION,
        "before_epoch=self.epoch)",
        "before_epoch=self.epoch + 1)",
        test="tests/protocol/test_session.py::test_sweep_removes_orphans_of_older_epochs_and_nothing_else",
    ),
    Mutant(
        "a root that was made anew is not noticed",
        _SESSION,
        "        if (seen := _root_in(self.store)) != self.root:\n",
        "        if False:\n",
        test="tests/protocol/test_places.py::test_a_root_without_its_claim_or_its_format_is_not_the_one_that_was_claimed",
    ),
    Mutant(
        "a commit whose data files are there is taken back",
        _SESSION,
        "if next(iter(self.store.list(newest.prefix)), None) is not None:",
        "if False:",
        test="tests/protocol/test_places.py::test_only_a_commit_of_which_nothing_is_left_is_taken_back",
    ),
    Mutant(
        "a log without FORMAT gets a new one",
        _LOG,
        "if keys and has_remains(store):",
        "if False:",
        test="tests/protocol/test_session.py::test_log_without_format_is_not_claimed_anew",
    ),
    Mutant(
        "a store is believed to refuse a second writer",
        _CLAIM,
        "if not _create_format(store, encode_format(root), sources):",
        "if True:",
        test="tests/protocol/test_session.py::test_store_that_cannot_refuse_a_second_writer_is_refused",
    ),
)

ALL = (*RECORDS, *READING, *LIVE_SETS, *APPENDS, *SESSIONS)
