"""Faults that the suite must find: `python -m tests.mutants [PART ...]`; with arguments only files that contain one.

A mutant is a file, a text that occurs once in it, what replaces it, and the tests that must fail then. The tree is
copied to a temporary folder, and one mutant at a time is applied there. The exit status is 1 if one survives, if its
text is not there exactly once, or if its tests fail without it. pytest does not collect this file.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 400  # seconds of the tests of one mutant; what hangs is found
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "site", "shared", ".*_cache", "*.egg-info")

# The file below lantern/, the tests below tests/ that must fail, and in brackets a feature that the processor needs;
# then a text and what replaces it.
TABLE = r"""
core/sampling.py: core/test_sampling.py
- guided = unconditional + (conditional - unconditional) * self._value(GUIDANCE, conditional.ndim)
+ guided = conditional + (unconditional - conditional) * self.guidance
- return torch.where((positions <= self.guidance_interval + 1)[..., None]
+ return torch.where((positions <= self.guidance_interval)[..., None]
- logits.topk(k, sorted=False)
+ logits.topk(k + 1, sorted=False)
- least = np.partition(values, -k, axis=-1)[..., -k, None]
+ least = np.partition(values, -k, axis=-1)[..., 1 - k, None]
- .cumsum(-1).roll(1, -1)
+ .cumsum(-1)
- uniforms[..., None] * sums[..., -1:]
+ uniforms[..., None]

core/sampling.py: core/test_noise.py
- [zeros + int(purpose), iterations
+ [zeros, iterations
- key = purpose_key(seeds[part], Purpose(purpose), iterations[part])
+ key = purpose_key(seeds[part], Purpose(purpose))
- missing.difference_update(rows)
+ pass
- table[:, where] = to_gumbel(
+ table[:, : len(where)] = to_gumbel(
- self.make_gumbel(purpose_key(seeds, purpose), images, where,
+ self.make_gumbel(purpose_key(images, purpose), seeds, where,

core/types.py: core/test_buffers.py
- key = (name, value.shape
+ key = (name.split(".")[0], value.shape

core/io.py: core/test_io.py
- if state[name].shape != tensor.shape:
+ if state[name].numel() != tensor.numel():
- temporary.unlink(missing_ok=True)
+ pass

core/types.py: methods
- ancestors = nodes[:, None] >= nodes
+ ancestors = nodes[:, None] <= nodes

core/types.py: drafters/test_drafts_match_training.py
- return pad(self.path, (1, 0))
+ return pad(self.path, (0, 1))

decoding/cache.py: proof/test_trees.py
- start[:, None] + self._first_slots[: nodes.shape[1]])
+ start[:, None] + self._first_slots[: nodes.shape[1]] + 1)
- self._tokens < lengths[:, None]
+ self._tokens <= lengths[:, None]

decoding/cache.py: drafters/test_small_models.py
- self._ends.scatter_(1, slots, is_end |
+ self._ends[:, self.first_stage_slot :] = False; self._ends.scatter_(1, slots, is_end |
- is_end = (places - self.prefix + 1) % self.columns == 0
+ is_end = (places - self.prefix) % self.columns == 0

decoding/cache.py: decoding/test_joint.py
- if part.buffer.data_ptr() != buffer.data_ptr():
+ if part.buffer.data_ptr() == buffer.data_ptr():

decoding/loop.py: methods
- places = known[:, None] - 1 + tree.shape.depths
+ places = known[:, None] + tree.shape.depths
- places[:, : log_q.shape[1]] + 1)
+ places[:, : log_q.shape[1]])
- self.tree = tree if self.forced is None else self.forced.tree(tree, self.known)
+ self.tree = tree
- self.cache.commit(verdict.walked, self.root)
+ self.cache.commit(verdict.walked, self.known)
- places = self.places_of(self.tree, self.root)
+ places = self.places_of(self.tree, self.known)
- counts = torch.minimum(verdict.length + 1, self.count - start)
+ counts = verdict.length + 1
- max((self.tokens < 0).any(0).nonzero()
+ max((self.tokens < 0).all(0).nonzero()
- return logits, self.places.gather(1, nodes)
+ return logits, self.places[:, : nodes.shape[1]]
- return self.sampling.log_probs(self.logits, self.places, self.may_stop)
+ return self.logits[:, 0].log_softmax(-1)

decoding/loop.py: decoding/test_finite.py
- read = logits if verdict.log_q is not None else logits_at(logits, verdict.walked)
+ read = logits[:, :, :1]
+ (counts[:, None] - 1 <= ahead)

decoding/checked.py: decoding/test_checked.py
- is_wrong = (roots != tokens[:, 0])
+ is_wrong = (roots != roots)
- shape.depth < int(depths.max())
+ shape.depth != int(depths.max())
- (int(shape.ranks.max()) + 1)
+ shape.num_nodes
- if not torch.equal(shape.ancestors.expand_as(ancestors), ancestors):
+ if not torch.equal(shape.ancestors, shape.ancestors):

decoding/plain.py: decoding/test_plain.py
- scores.logits, place, self.noise
+ scores.logits, place - 1, self.noise

decoding/cache.py: methods/test_contracts.py decoding/test_plain.py
- numbers <= block[:, None]
+ numbers < block[:, None]

decoding/cache.py: decoding/test_prefill.py
- {type(target).__qualname__} {rows} {whole}
+ {type(target).__qualname__} {whole}
- f"{type(target).__qualname__} {rows}
+ f"{rows}

decoding/rounds.py: decoding/test_joint.py
- if before.get(id(state), name) != name:
+ if before.get(id(state), name) is None:
- rows, nodes = slice(row, row := row + len(part.positions)), part.positions.shape[1]
+ rows, nodes = slice(row, len(part.positions)), part.positions.shape[1]
- rounds = self._drive(placed, rounds)
+ rounds = self._drive(members, rounds)
- torch.cat([pad(part.mask, nodes) for part in parts]),
+ torch.cat([pad(part.mask, nodes) for part in parts[::-1]]),

decoding/row_front.py: decoding/test_row_front.py
- is_other = heads[:, None] < front.heads[..., None]
+ is_other = heads[:, None] <= front.heads[..., None] - 2
- features[:, :, first - 1 : first - 1 + columns]
+ features[:, :, first : first + columns]

decoding/statistics.py: methods
- is_accepted = (is_inside & (steps < length))
+ is_accepted = (is_inside & (steps <= length))

decoding/statistics.py: decoding/test_finite.py
- return logits.sum((1, 2, 3))
+ return logits[:, :1].sum((1, 2, 3))

verifiers/coupling.py: proof/test_exact.py
- threshold = uniforms[:, :-1, 0]
+ threshold = uniforms[:, :-1, 1]
- sampled = pick(torch.where((is_fresh | is_empty)[..., None], p, above), uniforms[..., 1])
+ sampled = pick(p, uniforms[..., 1])
- noise.uniform(rows.places, 2, iterations=rows.places[:, 0])
+ noise.uniform(rows.places, 2)
- sampled, log_p, cost)
+ sampled, log_p if tree.log_q is None else tree.log_q.where(pad(is_kept, (0, 1))[..., None], log_p), cost)
- (q - kept).sum(-1, keepdim=True) * p
+ (1 - (q - kept).sum(-1, keepdim=True)) * p

verifiers/relaxed.py: verifiers/relaxations/test_by_hand.py
- raised = own + claim.mass
+ raised = own

verifiers/gumbel.py: verifiers/test_by_hand.py
- (shape.ancestors & ~matches[:, None, :]).any(-1)
+ ~matches

verifiers/gumbel.py: proof/test_exact.py
- next_token = sampled.gather(1, path.last[:, None])[:, 0]
+ next_token = sampled[:, 0]

verifiers/rejection.py: proof/test_exact.py
- after = normalised((left - proposal).clamp_(min=0.0), left, numbers.is_one)
+ after = (left - proposal).clamp_(min=0.0)
- q = normalised(q.scatter(1, before, 0.0), q, numbers.is_one)
+ q = q.scatter(1, before, 0.0)
- taken), is_open ^ is_accepted
+ taken), is_open
- return Outcome(taken, left, is_relaxed
+ return Outcome(taken, p, is_relaxed
- left = numbers.where(is_alive, probabilities(rows.log_p(at)[:, 0]), left)
+ left = numbers.where(is_alive, probabilities(rows.log_p(at * 0)[:, 0]), left)
- Purpose.RESIDUAL
+ Purpose.DRAFT
- cells = (shape.parents * width + shape.ranks)
+ cells = (shape.parents * width + width - 1 - shape.ranks)

verifiers/scripted.py: eval/speed/test_bench.py
- table[place] = count - 1
+ table[place] = count

verifiers/traversal.py: proof/test_traversal.py
- rates[node] = torch.where(is_child & (base > 0), total / base.clamp(min=1e-300), rate)[:, 0]
+ rates[node] = rate[:, 0]
- p[node] = torch.where(is_child, normalised(rest, p[node]), p[node]).to(p[node].dtype)
+ pass
- normalised(rest, p[node])
+ normalised((p[node] - q[node]).clamp(min=0.0), p[node])
- normalised(q[node].scatter(1, child, 0.0), q[node])
+ q[node].scatter(1, child, 0.0)

verifiers/rejection.py: verifiers/test_relaxed.py
- law = (left * (1.0 - chance)[:, None])
+ law = (left * (1.0 - trial.own_p)[:, None])
- cost = Cost(relaxed, spent, distance, self.relaxation.bound)
+ cost = Cost(relaxed, spent.clamp(max=1.0), distance, self.relaxation.bound)

verifiers/relaxed.py: verifiers/test_relaxed.py
- is_relaxed = ~tests.is_best.gather(1, path.nodes) & (path.nodes > 0)
+ is_relaxed = ~tests.is_best.gather(1, path.nodes)
- log_r = torch.where(has_children[..., None], log_r, log_p)
+ log_r = log_r.clone()
- ratio = log_p.flatten(1).gather(1, cells) - log_r.flatten(1).gather(1, cells)
+ ratio = log_r.flatten(1).gather(1, cells) - log_p.flatten(1).gather(1, cells)

verifiers/relaxations/distributions.py: verifiers/relaxations/test_bounded.py
- for part in (outflow, inflow))
+ for part in (outflow / 2, inflow))
- deficit = torch.minimum(gap, (self.cap - 1) * own)
+ deficit = torch.minimum(gap, self.cap * own)

verifiers/relaxations/distributions.py: verifiers/relaxations/test_by_hand.py
- r = p + taken - surplus * share[:, None]
+ r = p + taken - surplus
- is_skipped = depths < self.skip
+ is_skipped = depths <= self.skip
- lost.mul_(share)
+ lost.mul_(1.0)

verifiers/relaxations/acceptance.py: verifiers/relaxations/test_by_hand.py
- window = place + around
+ window = trial.tokens[:, None] + around
- clamp(max=self.epsilon)
+ clamp(min=self.epsilon)

verifiers/relaxations/neighbours.py: verifiers/relaxations/test_by_hand.py
- return float(self.delta)
+ return float(self.delta) / 2
- return float(self.lambda_ - 1)
+ return float(self.lambda_)
- trial.p.gather(1, near).masked_fill_(claim.is_taken, 0.0)
+ trial.p.gather(1, near)
- self.table[trial.tokens, : self.k + 1]
+ self.table[trial.tokens, : self.k]

verifiers/relaxations/neighbours.py: verifiers/relaxations/test_bounded.py
- is_taken = sums <= budget.double()[..., None]
+ is_taken = masses.double() <= budget.double()[..., None]

verifiers/relaxations/rule.py: verifiers/test_by_hand.py
- return self.q.gather(1, self.tokens[:, None])[:, 0]
+ return self.p.gather(1, self.tokens[:, None])[:, 0]

verifiers/relaxations/acceptance.py: verifiers/test_relaxed.py
- torch.expm1(self.samples * torch
+ torch.expm1((self.samples - 1) * torch

methods/method.py: methods/test_method.py
- else f"parts/{self.name}"
+ else f"part/{self.name}"

drafters/base.py: drafters/test_dynamic.py
- "sampled": Purpose.DRAFT
+ "sampled": Purpose.TARGET

drafters/combined.py: drafters/test_sam.py
- self.order = self.held.order
+ self.order = self.held.order.sort().values

drafters/combined.py: drafters/test_small_models.py
- level.first, depth)
+ level.first, depth - 1)
- self.known[:, None] + depths - 1
+ self.known[:, None] + depths
- 0, self.held.depths[1:])
+ 0, self.held.depths[:-1])

drafters/eagle/drafter.py: drafters/test_drafts_match_training.py
- self._followed(depth - 1)
+ self._followed(depth)
- features = self.sampling.guide(features, self._read_places)[:, None]
+ features = features[:, :1]

drafters/eagle/drafter.py: drafters/test_dynamic.py
- starts += [above] * count
+ starts += [0] * count
- .scatter(1, inner, order).gather(1, kept)
+ .scatter(1, inner, order)[:, : kept.shape[1]]

drafters/eagle/networks.py: drafters/test_eagle.py
- return torch.cat([self.embed_tokens(tokens), features], dim=-1)
+ return torch.cat([features, self.embed_tokens(tokens)], dim=-1)
- self.fc.weight.data[:, -self.config.dim :]
+ self.fc.weight.data[:, : self.config.dim]
- return min(depth // self.config.per_layer,
+ return min((depth + 1) // self.config.per_layer,

drafters/eagle/drafter.py: drafters/test_eagle.py
- sort(descending=True, stable=True)
+ sort(descending=False, stable=True)

drafters/eagle/networks.py: drafters/test_drafts_match_training.py
- there <= here - done
+ there < here - done

drafters/eagle/vispec.py: drafters/test_drafts_match_training.py
- seen = (held >= 0) & (held // grid >= oldest)
+ seen = (held >= 0) & (held // grid > oldest)
- (start[:, None] + steps) % self.tokens
+ (start[:, None] + steps + 1) % self.tokens

drafters/base.py: drafters/test_drafts_match_training.py
- rows[:, 1] + scales * (rows[:, 0] - rows[:, 1])
+ rows[:, 0] + scales * (rows[:, 1] - rows[:, 0])

drafters/heads.py: drafters/test_drafts_match_training.py
- (known[:, None] + self.held.steps_ahead)
+ (known[:, None] + 1 + self.held.steps_ahead)
- predicted[:, :-reach, head]
+ predicted[:, reach:, head]
- (is_mask & is_mask[:, None] & (steps <= steps[:, None]))
+ (is_mask & is_mask[:, None] & (steps == steps[:, None]))
- below = self.held.places + self.module.config.grid
+ below = self.held.places + self.module.config.grid - 1

drafters/lookup.py: drafters/test_sam.py
- .masked_fill(past.known[:, None] < back, -2)
+ .masked_fill(past.known[:, None] < 0, -2)
- FIELDS = ((0, -1), (-1, 0)
+ FIELDS = ((-1, 0), (0, -1)
- held.known[:, None] + steps, step.tokens)
+ held.known[:, None] + steps - 1, step.tokens)
- context.lengths[:, parents, :, :-1] + 1
+ context.lengths[:, parents, :, 1:] + 1
- torch.cdist(points, centres).argmin(1)
+ torch.cdist(points, centres).argmax(1)

drafters/policies.py: drafters/policies
- (self.nodes / depth).ceil()
+ (self.nodes / depth).floor()
- pool.values >= math.log(self.threshold)
+ pool.values < math.log(self.threshold)
- (layer.depth >= self.check)
+ (layer.depth > self.check)
- layer.log_q if self.value == "q" else layer.match
+ layer.match if self.value == "q" else layer.log_q
- torch.minimum(places, known[:, None]) - 1
+ places - 1
- depth + (depth == pool.deepest)
+ depth
- self._is_over = self._is_over | (
+ self._is_over = (
- (layer.depth > 0)
+ (layer.depth > 1)

drafters/records.py: drafters/policies
- is_tested = on_path.gather(1, parents)
+ is_tested = on_path

core/types.py: drafters
- reach *= 2
+ reach *= 4

drafters/trees.py: drafters/test_dynamic.py
- parents = numbers.gather(1, above)
+ parents = above.clamp(max=kept.shape[1] - 1)

drafters/trees.py: drafters
- first += len(frontier) if frontier != [0] else 0
+ first += len(frontier)
- above.index(parents[node]) for
+ 0 for
- is_inner.cumsum(0) - 1, 0)
+ is_inner.cumsum(0), 0)
- [pick + start for
+ [pick + start // 2 for
- * width + ranks[child] for
+ * width + ranks[child] // 2 for

drafters/windows.py: drafters/test_windows.py
- index = counts[:, None] + steps
+ index = counts[:, None] + steps + 1
- (step.counts[:, None] + self.held.steps).clamp(max=self.depth)
+ (step.counts[:, None] + self.held.steps - 1).clamp(max=self.depth)

drafters/windows.py: proof/test_exact.py
- own.masked_fill(is_new[..., None], 0.0)
+ own.masked_fill(is_new[..., None], -1.0)

engines/pass_times.py: engines/cuda/test_trial.py
- self.cache.first.fill_(1)
+ self.cache.first.fill_(0)
- cache.buffer[..., begin : begin + node, :] =
+ cache.buffer[..., begin + 1 : begin + node + 1, :] =

engines/pass_times.py: engines/test_pass_times.py
- mask[..., : begin + node] =
+ mask[..., : begin + node - 1] =
- * (nodes - low) / (high - low)
+ * (high - nodes) / (high - low)

engines/engine.py: engines/test_engine.py
- return nodes <= MOST_WIDE
+ return nodes < 2
- {"amx": False}
+ {}
- narrows(config, can_wait=can_wait)
+ narrows(config)

core/weights.py: engines/cpu/test_target.py
- if of != weights or made is None:
+ if made is None:

engines/cpu/build.py: engines/cpu/test_build.py
- if record != {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}:
+ if not record:
- names = [library_name(variant) for variant in supported()]
+ names = [library_name(variant) for variant in supported()[::-1]]
- if variant.features <= features()
+ if variant.features >= features()

../models/llamagen/text.py: engines/cpu/test_portable.py
- and size <= WIDE else None
+ and size < 0 else None

engines/cpu/target.py: engines/cpu/test_drafter.py
- own = cache.buffer[2 * number : 2 * number + 2]
+ own = cache.buffer[:2]

engines/cpu/engine.py: engines/cpu/test_steps.py
- length, cost = (path > 0).sum(1), None
+ length, cost = (path > 1).sum(1), None
- self._places = (torch.arange(nodes) + first)
+ self._places = (torch.arange(nodes).flip(0) + first)

engines/cpu/target.py: engines/cpu/test_steps.py
- (key.low, key.high, images, positions)
+ (key.low, key.low, images, positions)

engines/cpu/vq.py: engines/cpu/test_vq.py
- return self.second(self.first(x), residual=own, out=own)
+ return self.second(self.first(x), residual=x, out=own)

engines/cpu/sampling.h: engines/cpu/test_sampling.py
- if (total >= k) found |= bit;
+ if (total > k) found |= bit;
- where <= interval + 1
+ where <= interval
- std::fill(to + count, to + whole, NAN)
+ std::fill(to + count, to + whole, 0.0f)

engines/cpu/mixture.h: engines/cpu/test_sampling.py
- (cap - 1) * own
+ cap * own
- std::min(delta * UNITS / std::max(total, 1.0), 1.0)
+ std::min(delta * UNITS / std::max(total, 1.0), 1.001)

engines/cpu/steps.cpp: engines/cpu/test_steps.py
- return ends || is_new;
+ return ends;
- (state.is_staged ? known - 1 : where + 1)
+ (state.is_staged ? known - 1 : where)
- if (count + j < state.nodes) {
+ if (count + j + 1 < state.nodes) {
- if (i < length) *of.relaxed += cost.relaxed;
+ *of.relaxed += cost.relaxed;
- for (int i = 0; i <= length && known - 1 + i < state.tokens; i++)
+ for (int i = 0; i < length && known - 1 + i < state.tokens; i++)
- slots + stage[i ? path[i - 1] : 0] * head_dim
+ slots + stage[i] * head_dim

engines/cpu/images.h: engines/cpu/test_steps.py
- where <= of.interval + 1
+ where <= of.interval
- (bits + 0x7fff + (bits >> 16 & 1))
+ (bits + 0x7fff)

engines/cpu/structures.py: engines/cpu/test_steps.py
- self.kept = fields
+ pass

engines/cpu/draft.h: engines/cpu/test_steps.py
- narrowed(last[i % dim] + of.mask_inputs[i], of.is_half)
+ narrowed(last[i % dim], of.is_half)
- ranked[size_t(b) * total + begin + level.pairs[i]]
+ ranked[size_t(b) * total + begin + i]
- if (level.ancestors[size_t(i) * level.staged + k]) row[of.tokens + k] = 0;
+ row[of.tokens + k] = 0;

engines/cpu/noise.h: engines/cpu/test_steps.py
- k1 += 0xBB67AE85
+ k1 += 0xBB67AE84
- j < std::min(i + PAIR, 4 * queued)
+ j < i + PAIR - 1
- 34 * LOG_2
+ 3 * LOG_2
- - magic + 1.0) * LOG_2
+ - magic) * LOG_2
- sums[at - 1] < sum; at--
+ sums[at - 1] < sum; at = 0

engines/cpu/rejection.h: engines/cpu/test_steps.py
- std::exchange(q[before], 0.0f)
+ q[before]
- for (int i = 0; i < claim.count; i++) after[near[i]] = 0;
+ for (int i = 1; i < claim.count; i++) after[near[i]] = 0;
- (by.is_shared ? spent : 0.0f)
+ 0.0f
- i <= by.near; i++
+ i < by.near; i++
- (1 - chance) * apart()
+ apart()

engines/cpu/pass.cpp: engines/cpu/test_target.py
- const Unit rotated = part.which < 2 ?
+ const Unit rotated = part.which < 1 ?

engines/cpu/convolution.h: engines/cpu/test_vq.py
- from_points(turned + i * PATCH, 1, results);
+ from_points(turned + i, PATCH, results);

engines/cpu/thread_policy.h: engines/cpu/test_thread_policy.py
- } else if (seconds > 2 * single) {
+ } else if (seconds < 2 * single) {
- distance *= 2, level += most
+ distance *= threads, level += most

engines/cpu/tiles.h: engines/cpu/test_target.py [amx_bf16]
- _tile_loadd(5, below + k, wide);
+ _tile_loadd(5, above + k, wide);

engines/cuda/engine.py: engines/test_engine.py
- nodes > constant_rows(lines)
+ nodes >= constant_rows(lines)

engines/cuda/fused.py: engines/cuda/test_target.py
- made = scaled(tl.sum(total, 0), SCALE, column, inside)
+ made = tl.sum(total, 0)
- SCALE, STEP * pair + APART, inside)
+ SCALE, STEP * pair, inside)
- even, odd = one * cos - two * sin, two * cos + one * sin
+ even, odd = one * cos - two * sin, two * cos - one * sin

engines/cuda/fused_eagle.py: engines/cuda/test_target.py
- lengths=cache.first, ahead
+ lengths=cache.first - 1, ahead
- is_here = (sees > 0)[None] & (
+ is_here = (

engines/cuda/target.py: engines/cuda/test_target.py
- entered[number] = self._live(x, attention).clone()
+ entered[number] = self._live(x, attention)
- rope_positions = positions if attention.lengths is None else positions + attention.lengths
+ rope_positions = positions

engines/cuda/graphs.py: engines/cuda/test_reuse.py
- if state.index < SETTLING_ROUNDS:
+ if state.index < 0:
- and self.is_forced == (state.forced is not None)
+ and True
- copy_all(old, new)
+ return step

decoding/wave.py: engines/cuda/test_reuse.py
- SETTLING_ROUNDS = 2
+ SETTLING_ROUNDS = 0

engines/cuda/kernels.py: engines/cuda/test_kernels.py
- small = (size + 16384.0)
+ small = (size + 8192.0)
- tl.sum(tl.where(inside, scores, 0.0), 0))
+ 0.0)
- GRID + image * grid_stride + place,
+ GRID + image * grid_stride + place + 1,
- tl.log(tl.sum(tl.exp(scores - largest), 0))
+ tl.log(tl.sum(tl.exp(scores - largest), 0) + 1.0)
- scores = tl.where(inside & (scores == float("-inf")), -1e38, scores)
+ scores = tl.where(inside & (scores != scores), -1e38, scores)
- chance = (top - largest) / spread - log_sum
+ chance = top - largest - log_sum
- bound = least_of(scores, VALUES + image * values_stride)
+ bound = least_of(scores, VALUES)

engines/cuda/kernels.py: engines/cuda/test_target.py
- seen = places[:, None] == tl.where(score == 0.0, place, -1)[None]
+ seen = places[:, None] == tl.where(score <= 0.0, place, -1)[None]
- total = own + tl.sum(factors * sums, 0)
+ total = own + tl.sum(sums, 0)
- tl.where(token < length, prefix - length + token, -1)
+ tl.where((token >= prefix - length) & (token < prefix), token, -1)
- places = full * BLOCK + columns
+ places = full * BLOCK + tl.where(live > 1, SIZE - 1 - columns, columns)
- tl.store(Y + row * DIM + at, (y * weight)
+ tl.store(Y + row * DIM + at, (y)

engines/cuda/llama.py: engines/cuda/test_target.py
- max(1 << (length - 1).bit_length(), LEAST_TOKENS)
+ max(length, LEAST_TOKENS if image == 0 else 1)

engines/cuda/__init__.py: engines/cuda/test_target.py
- rows = constant_rows(lines)
+ rows = 1

engines/cuda/__init__.py: engines/test_engine.py
- while rows > 1 and lines * rows > RIDGE:
+ while rows > 1 and lines * rows > 2 * RIDGE:

engines/cuda/target.py: engines/cuda/test_kernels.py
- table = None if purpose is None else noise.gumbel_table(purpose)
+ table = None if purpose is None else noise.gumbel_table()

engines/cuda/trial.py: engines/cuda/test_trial.py
- if not difference <= most:
+ if difference <= 0:

engines/cuda/walk.py: engines/cuda/test_walk.py
- for sign in range(-1, 2, 2):
+ for sign in range(-1, 1, 2):
- | (SIZE - 1 - step)) * sign
+ | step) * sign
- elif IS_COOL:
+ elif IS_RELEASED:
- p_scale = tl.div_rn(1.0, sum_new)
+ p_scale = p_scale * 1.0
- tl.store(NEXT + image, tl.load(SAMPLED + image * nodes + last))
+ tl.store(NEXT + image, tl.load(SAMPLED + image * nodes))
- for start in range(0, SIZE, CHUNK):
+ for start in range(0, CHUNK, CHUNK):

engines/cuda/relax.py: engines/cuda/test_walk.py
- (TOKEN_COUNT - 1 - at)
+ at
- tl.floor(left * tl.maximum(kept, 0.0))
+ tl.floor(left * tl.minimum(kept, 0.0))
- cut = tl.minimum(total * scale
+ cut = tl.minimum(total

engines/cuda/target.py: engines/cuda/test_walk.py
- return verifier.complete(verdict, tree, rows, relaxed)
+ return verdict

engines/cuda/couple.py: engines/cuda/test_walk.py
- length = tl.min(tl.where(is_kept, NODES, number), 0)
+ length = tl.min(tl.where(is_kept, NODES, number), 0) + 1
- is_fresh = is_last | is_redrawn
+ is_fresh = is_last
- is_fresh = is_fresh | (over_total <= 0.0)
+ is_fresh = is_fresh
- passed = tl.max(sums, 0)
+ passed = passed
- rest += tl.where(p > reuse * q, 0.0, q)
+ rest += tl.where(p > reuse * q, q, 0.0)

engines/cuda/walk.py: engines/cuda/test_claimed.py
- scratch = torch.empty(images, 3, size, dtype=torch.float32, device=device)
+ scratch = torch.empty(images, 3, size, dtype=torch.float32)

decoding/wave.py: engines/cuda/test_wave.py
- if any(state.index < SETTLING_ROUNDS for state in states):
+ if False:
- mine.copy_image(place, its, of)
+ mine.copy_image(place, its, 0)
- if one.index >= SETTLING_ROUNDS
+ if one.index >= 0
- batch, of = (source.batch, inside[state]) if source is not None and state in inside else (state, 0)
+ batch, of = state, 0
- wave.cache.form == form
+ True
- != self._weights:
+ and not self._weights:

decoding/cache.py: engines/cuda/test_wave.py
- self._mask.buffer[place].copy_(other._mask.buffer[of])
+ pass

core/sampling.py: engines/cuda/test_wave.py
- self._keys[place] = other._keys[of]
+ pass

engines/cuda/kernels.py: engines/cuda/test_walk.py
- * tl.load(VALUES + image * values_stride)
+ * tl.load(VALUES)
- tl.load(VALUES + image * values_stride + 1)
+ tl.load(VALUES + 1)

decoding/loop.py: engines/cuda/test_reuse.py
- (sampling or state.sampling).values(
+ state.sampling.values(

decoding/loop.py: engines/cuda/test_wave.py
- state.sampling.hold(state.held.sampling)
+ state.sampling.hold(state.held.sampling.clone())

engines/cuda/target.py: engines/cuda/test_claimed.py
- squares = fused.squares_of(x)
+ squares = fused.squares_of(x)[: int(positions.max()) + 999]
"""


class Mutant(NamedTuple):
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    needs: str


def mutants() -> Iterator[Mutant]:
    """Yield those of the table."""
    path, tests, needs, old = "", ("",), "", ""
    for line in TABLE.strip().splitlines():
        if line.startswith("- "):
            old = line[2:]
        elif line.startswith("+ "):
            yield Mutant(f"lantern/{path}", old, line[2:], tests, needs)
        elif line:
            path, _, rest = line.partition(": ")
            named, _, needs = rest.rstrip("]").partition(" [")
            tests = tuple(named.split())


def run_tests(tree: Path, tests: Sequence[str], *, is_cpp: bool = False) -> int:
    """Return the exit status of pytest for some tests of a tree; 1 too if they hang."""
    places = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    if is_cpp:  # the user's cache is not for libraries of mutants
        places["XDG_CACHE_HOME"] = str(tree / "cache")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{one}" for one in tests)]
    try:
        made = subprocess.run(
            command, cwd=tree, env=os.environ | places, capture_output=True, text=True, timeout=LONGEST * len(tests)
        )
    except subprocess.TimeoutExpired:
        return 1
    if made.returncode > 1:
        print(made.stdout[-2000:], made.stderr[-2000:])
    return made.returncode


def outcome(tree: Path, mutant: Mutant) -> str:
    """Apply a mutant, run its tests, and take it back; return what became of it."""
    if mutant.needs and mutant.needs not in Path("/proc/cpuinfo").read_text("utf-8"):
        return "skipped"
    file, begun = tree / mutant.path, time.perf_counter()
    text = file.read_text("utf-8")
    file.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    try:
        status = run_tests(tree, mutant.tests, is_cpp=file.suffix != ".py")
    finally:
        file.write_text(text, "utf-8")
    found = {0: "survived", 1: "caught"}.get(status, "broken")
    print(
        f"{found:8} {time.perf_counter() - begun:4.0f} s  {mutant.path}: {mutant.new.strip() or mutant.old.strip()}",
        flush=True,
    )
    return found


def main(wanted: list[str]) -> int:
    """Apply the mutants, print what becomes of each, and return the exit status."""
    chosen = [one for one in mutants() if not wanted or any(part in one.path for part in wanted)]
    if not chosen:
        print(f"no mutant is of {', '.join(wanted)}")
        return 1
    lost = [one for one in chosen if (ROOT / one.path).read_text("utf-8").count(one.old) != 1]
    for one in lost:
        print(f"lost     {one.path}: the text is not there exactly once: {one.old}")
    with tempfile.TemporaryDirectory(prefix="lantern-mutants-") as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        if run_tests(tree, sorted({test for one in chosen for test in one.tests})) != 0:
            print("the tests fail without a mutant")
            return 1
        found = [outcome(tree, one) for one in chosen if one not in lost]
    print(", ".join(f"{found.count(kind)} {kind}" for kind in ("caught", "survived", "broken", "skipped")))
    return int(bool(lost) or "survived" in found or "broken" in found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
