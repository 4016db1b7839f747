"""Wrong changes of what deletes, of what makes files durable, and of what checks bytes."""

from __future__ import annotations

from tests.mutants.edit import Mutant

_COVERAGE = "ckpt/format/chunk_rules.py"
_LOCAL = "storage/local.py"
_MAINTENANCE = "ckpt/commit/maintenance.py"
_PUBLISH = "ckpt/saving/save.py"
_READER = "ckpt/loading/reader.py"
_BLOCK_SUMS = "ckpt/loading/block_sums.py"
_SWEEP = "ckpt/commit/writer.py"
_WRITER = "ckpt/commit/writer.py"

DELETION = (
    Mutant(
        "what is live can be deleted as if it were retired",
        _WRITER,
        "            refuse_needed(state, attempt)\n",
        "",
        test="tests/protocol/test_session.py::test_files_of_a_live_checkpoint_are_deleted_by_nobody",
    ),
    Mutant(
        "a save under way can be deleted as if it were retired",
        _WRITER,
        "if attempt not in self._retired and attempt_epoch(attempt) >= state.epoch:",
        "if False:",
        test="tests/protocol/test_session.py::test_save_under_way_is_not_deleted_as_retired",
    ),
    Mutant(
        "a deletion believes any log",
        _WRITER,
        "            self._appender.prove()\n            refuse_needed",
        "            refuse_needed",
        test="tests/protocol/test_places.py::test_nothing_is_deleted_by_what_another_log_says",
    ),
    Mutant(
        "a full disk is swept by any log",
        _WRITER,
        "        self._appender.prove()\n        self.log.check_end()\n",
        "        self.log.check_end()\n",
        test="tests/protocol/test_places.py::test_a_full_disk_is_not_swept_by_what_another_log_says",
    ),
    Mutant(
        "anything can be retired",
        _WRITER,
        "            if problem := why_not_retire(state, entry):\n",
        "            if False:\n",
        test="tests/protocol/test_session.py::test_last_checkpoint_and_unknown_ones_are_not_retired",
    ),
    Mutant(
        "a checkpoint behind a link is retired",
        _WRITER,
        "if victim is not None and (problem := self.store.why_not_delete(victim.prefix)):\n",
        "if False:\n",
        test="tests/protocol/test_deletion.py::test_a_step_behind_a_link_is_not_retired",
    ),
    Mutant(
        "the reserve that was given up is not made again",
        _WRITER,
        "        if self._gave_up_reserve:\n",
        "        if False:\n",
        test="tests/protocol/test_deletion.py::test_a_full_disk_is_pruned_in_the_reserve",
    ),
    Mutant(
        "MANIFEST is deleted last",
        _SWEEP,
        "        store.delete(manifest)\n    rest = [key for key in keys if key != manifest]\n",
        "        pass\n    rest = sorted(keys, key=lambda key: key == manifest)\n",
        test="tests/protocol/test_session.py::test_every_operation_of_a_life_may_fail_or_kill",
    ),
    Mutant(
        "a sweep takes what live checkpoints refer to",
        _SWEEP,
        "    needed |= {name for e in state.live for name in e.references}\n",
        "",
        equivalent=(
            "what a live checkpoint refers to is live itself: commits and retirements both "
            "see to it"
        ),
    ),
    Mutant(
        "a sweep takes live checkpoints",
        _SWEEP,
        "    needed = {e.attempt for e in state.live}\n",
        "    needed = set[str]()\n",
        test="tests/protocol/test_session.py::test_sweep_removes_orphans_of_older_epochs_and_nothing_else",
    ),
    Mutant(
        "a sweep takes saves that are under way",
        _SWEEP,
        "attempt_epoch(one.attempt) < before_epoch",
        "attempt_epoch(one.attempt) <= before_epoch",
        test="tests/protocol/test_session.py::test_sweep_removes_orphans_of_older_epochs_and_nothing_else",
    ),
    Mutant(
        "a pinned checkpoint is retired",
        _SWEEP,
        "    if entry.pinned:\n",
        "    if False:\n",
        test="tests/service/test_retention.py::test_what_was_pinned_after_the_plan_was_made_stays",
    ),
    Mutant(
        "a checkpoint that others refer to is retired",
        _SWEEP,
        "    if users:\n",
        "    if False:\n",
        test="tests/protocol/test_session.py::test_referenced_attempt_is_kept_and_a_retired_reference_drops_the_commit",
    ),
    Mutant(
        "the only checkpoint is retired",
        _SWEEP,
        "    if len(state.entries) == 1:\n",
        "    if False:\n",
        test="tests/protocol/test_session.py::test_the_last_of_a_training_and_the_last_of_all_stay",
    ),
    Mutant(
        "the only checkpoint of a training is retired",
        _SWEEP,
        "    if entry.line is not None and next(others, None) is None:\n",
        "    if False:\n",
        test="tests/protocol/test_session.py::test_the_last_of_a_training_and_the_last_of_all_stay",
    ),
    Mutant(
        "files of others are deleted with a checkpoint",
        _SWEEP,
        "ours = [key for key in keys if is_our_name(key.removeprefix(prefix))]",
        "ours = list(keys)",
        test="tests/protocol/test_deletion.py::test_foreign_files_in_a_step_directory_stay",
    ),
    Mutant(
        "what has no name of ours is deleted",
        _SWEEP,
        " if parse_step_key(info.key) is not None]",
        "]",
        equivalent="names of ours are among them, and no manifest can list another",
    ),
    Mutant(
        "a copy of a checkpoint that was retired meanwhile is committed",
        _MAINTENANCE,
        "            if original is None:\n",
        "            if False:\n",
        test="tests/protocol/test_session.py::test_a_copy_is_committed_only_beside_its_original_and_in_its_epoch",
    ),
    Mutant(
        "a copy is committed although a sweep may have taken its files",
        _MAINTENANCE,
        "            if attempt_epoch(commit.attempt) != state.epoch:\n",
        "            if False:\n",
        test="tests/protocol/test_session.py::test_a_copy_is_committed_only_beside_its_original_and_in_its_epoch",
    ),
)

DURABILITY = (
    Mutant(
        "a log record is not synced",
        _LOCAL,
        "file.finish(len(data), durable=True)",
        "file.finish(len(data), durable=False)",
        test="tests/storage/test_local.py::test_an_object_is_durable_before_it_has_its_name_and_its_name_afterwards",
    ),
    Mutant(
        "the directory of a log record is not synced",
        _LOCAL,
        "            # outcome takes that for success, so it has to survive a power failure, too.\n"
        "            self._sync_directories([os.path.dirname(final)])\n",
        "",
        test="tests/storage/test_local.py::test_an_object_is_durable_before_it_has_its_name_and_its_name_afterwards",
    ),
    Mutant(
        "a durable file is not synced",
        _LOCAL,
        "self._file.finish(self._ledger.nbytes, durable=self._durable)",
        "self._file.finish(self._ledger.nbytes, durable=False)",
        test="tests/storage/test_local.py::test_an_object_is_durable_before_it_has_its_name_and_its_name_afterwards",
    ),
    Mutant(
        "the directory of a durable file is not synced",
        _LOCAL,
        "                store._sync_directories([os.path.dirname(self._final)])\n",
        "                pass\n",
        test="tests/storage/test_local.py::test_an_object_is_durable_before_it_has_its_name_and_its_name_afterwards",
    ),
    Mutant(
        "parts of a joint file are not synced",
        _LOCAL,
        "                self._file.finish(self._ledger.nbytes, durable=True)\n",
        "                self._file.finish(self._ledger.nbytes, durable=False)\n",
        test="tests/storage/test_local.py::test_an_object_is_durable_before_it_has_its_name_and_its_name_afterwards",
    ),
    Mutant(
        "the directory of a joint file is not synced",
        _LOCAL,
        "            self._sync_directories([os.path.dirname(final)])\n\n    def abort_joint",
        "\n    def abort_joint",
        test="tests/storage/test_local.py::test_an_object_is_durable_before_it_has_its_name_and_its_name_afterwards",
    ),
    Mutant(
        "what was written at once is not synced afterwards",
        _LOCAL,
        "                _sync_path(path, os.O_RDONLY)\n",
        "                pass\n",
        test="tests/storage/test_local.py::test_sync_reaches_the_file_and_every_directory_above_it",
    ),
    Mutant(
        "a new directory is not synced in the one above",
        _LOCAL,
        "                    self._sync_entry(step)\n",
        "                    pass\n",
        test="tests/storage/test_local.py::test_sync_reaches_the_file_and_every_directory_above_it",
    ),
)

EXCLUSIVENESS = (
    Mutant(
        "a file is published over another",
        _LOCAL,
        "            os.link(temp, final)\n",
        "            os.replace(temp, final)\n            return\n",
        test="tests/storage/test_local.py::test_hard_links_of_others_do_not_make_two_writers_win",
    ),
    Mutant(
        "another's file of this name counts as one's own",
        _LOCAL,
        "            if not _is_file(final, ours):\n",
        "            if False:\n",
        test="tests/storage/test_local.py::test_hard_links_of_others_do_not_make_two_writers_win",
    ),
    Mutant(
        "something is deleted through a link",
        _LOCAL,
        '            if os.path.islink(f"{self._root}/{path}"):\n',
        "            if False:\n",
        test="tests/storage/test_local.py::test_nothing_is_deleted_through_a_linked_directory",
    ),
    Mutant(
        "a short read is no error",
        _LOCAL,
        "if start < 0 or end > file.nbytes or read(file, start, views) < end - start:",
        "if read(file, start, views) < 0:",
        test="tests/storage/test_local.py::test_a_file_that_was_cut_is_a_short_read",
    ),
)

WHOLENESS = (
    Mutant(
        "a tensor without any chunk is whole",
        _COVERAGE,
        "~is_filled & (numels > 0)",
        "~is_filled & (numels < 0)",
        test="tests/format/test_coverage.py::test_every_set_of_spans_between_whole_tensors",
    ),
    Mutant(
        "a tensor without its first elements is whole",
        _COVERAGE,
        "    bad[is_filled] |= starts[heads] != 0\n",
        "",
        test="tests/format/test_coverage.py::test_every_set_of_spans_between_whole_tensors",
    ),
    Mutant(
        "a tensor with a gap is whole",
        _COVERAGE,
        "        bad[tensor[first[tensor] != broken]] = True\n",
        "",
        test="tests/format/test_coverage.py::test_every_set_of_spans_between_whole_tensors",
    ),
    Mutant(
        "a tensor without its last elements is whole",
        _COVERAGE,
        "ends != numels[is_filled]",
        "ends < 0",
        test="tests/format/test_coverage.py::test_every_set_of_spans_between_whole_tensors",
    ),
    Mutant(
        "boxes of a tensor may have a gap",
        _COVERAGE,
        "    if covered < numel:\n",
        "    if False:\n",
        equivalent="the cut finds the gap too; only the text is another",
    ),
    Mutant(
        "boxes of a tensor may overlap",
        _COVERAGE,
        "        if volume != room.numel:\n",
        "        if False:\n",
        test="tests/format/test_coverage.py::test_overlap_with_a_gap_of_the_same_size_is_found",
    ),
    Mutant(
        "a save with problems is committed",
        _PUBLISH,
        "    if problems:\n        return Committed",
        "    if False:\n        return Committed",
        test="tests/e2e/test_bad_ranks.py::test_values_that_differ_are_named_with_their_ranks",
    ),
    Mutant(
        "a save whose outcome is unknown deletes its files",
        _PUBLISH,
        "    except (Fenced, LogDiverged, OutcomeUnknown):\n",
        "    except (Fenced, LogDiverged):\n",
        equivalent="a discard settles first, and deletes nothing while the outcome is unknown",
    ),
    Mutant(
        "a save that is interrupted can be committed later",
        _PUBLISH,
        "            session.session.give_up(header.attempt, step=header.step)\n",
        "            pass\n",
        test="tests/protocol/test_interrupts.py::test_an_interrupted_save_is_swept_by_the_next_one",
    ),
    Mutant(
        "any MANIFEST that is there counts as one's own",
        _PUBLISH,
        "        if store.get_bounded(key, len(data)) != data:\n",
        "        if False:\n",
        test="tests/e2e/test_lost_manifests.py::test_a_manifest_of_other_bytes_is_not_taken_for_ones_own",
    ),
)

CHECKSUMS = (
    Mutant(
        "blocks are read without a look at their checksums",
        _BLOCK_SUMS,
        "        if actual != expected:\n",
        "        if False:\n",
        test="tests/e2e/test_flips.py::test_every_block_is_checked_by_loads_of_parts_and_of_shared_blocks",
    ),
    Mutant(
        "what is read in place is not checked",
        _READER,
        "            for part, data in zip(parts, read, strict=True):\n"
        "                self._check(",
        "            for part, data in ((p, d) for p, d in zip(parts, read) if not p.address):\n"
        "                self._check(",
        test="tests/e2e/test_flips.py::test_every_flipped_bit_is_refused_or_harmless",
    ),
    Mutant(
        "what is read beside the target is not checked",
        _READER,
        "            for part, data in zip(parts, read, strict=True):\n"
        "                self._check(",
        "            for part, data in ((p, d) for p, d in zip(parts, read) if p.address):\n"
        "                self._check(",
        test="tests/e2e/test_flips.py::test_every_block_is_checked_that_is_read_beside_its_target",
    ),
    Mutant(
        "what is read for other ranks is not checked",
        _READER,
        "            check = partial(self._check_all, rows, data)\n",
        "            check = partial(self._check_all, rows[:0], data)\n",
        test="tests/e2e/test_flips.py::test_every_block_is_checked_by_loads_of_parts_and_of_shared_blocks",
    ),
    Mutant(
        "a checksum table is believed whatever its seal is",
        _BLOCK_SUMS,
        "        check_seal(seal_of(table), self.manifest.seals.of_file(file), self._where(file))"
        "\n",
        "        pass\n",
        test="tests/e2e/test_flips.py::test_every_flipped_byte_of_a_table_in_a_file_is_refused",
    ),
    Mutant(
        "bytes of a cache are believed",
        _READER,
        "            with contextlib.suppress(Corrupt):\n                check()\n",
        "            with contextlib.suppress(Corrupt):\n",
        test="tests/e2e/test_cache.py::test_damaged_blocks_are_read_again_and_put_right",
    ),
    Mutant(
        "bytes of the store are not checked",
        _READER,
        "            check()\n\n        once_more(read, self._store)\n",
        "\n        once_more(read, self._store)\n",
        test="tests/e2e/test_flips_on_the_way.py::test_a_byte_flipped_on_its_way_is_read_again",
    ),
)

ALL = (*DELETION, *DURABILITY, *EXCLUSIVENESS, *WHOLENESS, *CHECKSUMS)
