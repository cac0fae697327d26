// SPDX-License-Identifier: Apache-2.0

// Package advice computes which settings of a MoEDeployment pay by the models of its plan, and the patch that sets them.
//
// Invariants:
//   - A setting is advised only if the engine's release supports it, and the modelled time falls by at least the minimum
//     gain of the spec.
//   - The result states what is not modelled.
package advice

import (
	"cmp"
	"fmt"
	"strings"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/schedule"
)

// Verdict is the result for a setting.
type Verdict string

const (
	// Change: another value is modelled to be faster.
	Change Verdict = "Change"
	// Keep: no other value is modelled to be faster by the minimum gain.
	Keep Verdict = "Keep"
	// Unsupported: the engine does not support another value.
	Unsupported Verdict = "Unsupported"
	// NotModelled: the plan has no figures for the setting.
	NotModelled Verdict = "NotModelled"
)

// Item is the result for a setting.
type Item struct {
	// Setting is a field of the spec.
	Setting string `json:"setting"`
	// Now is the present value. Advised is the better one; empty unless the verdict is Change.
	Now     string  `json:"now"`
	Advised string  `json:"advised,omitempty"`
	Verdict Verdict `json:"verdict"`
	// Before is the modelled time of an MoE layer in microseconds with the present value, After with the best other one;
	// 0 if not modelled.
	Before float64 `json:"microseconds,omitempty"`
	After  float64 `json:"otherMicroseconds,omitempty"`
	// Why explains the verdict.
	Why string `json:"why"`

	patch map[string]any
}

// Advice is the result for a MoEDeployment.
type Advice struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// Plan is the short digest of the plan whose models are used; InService reports whether it serves.
	Plan      string `json:"plan"`
	InService bool   `json:"inService"`
	// Hardware is the hardware profile.
	Hardware string `json:"hardware,omitempty"`
	// BatchTokens are the batch sizes, over all ranks of a replica. Observed reports whether engines reported them; else
	// the plan was made for them.
	BatchTokens []int32 `json:"batchTokens"`
	Observed    bool    `json:"observed"`
	Items       []Item  `json:"items"`
	// Patch is a merge patch with all advised values; nil if no change is advised.
	Patch map[string]any `json:"patch,omitempty"`
}

// Input contains what the advice is computed from.
type Input struct {
	Moed *semmoev1.MoEDeployment
	// ShortDigest is the short digest of the plan whose models are used.
	ShortDigest string
	// Schedule and Hardware are nil if the plan does not contain them.
	Schedule *schedule.Schedule
	Hardware *hardware.Profile
	// SlotsPerRank is the number of experts of a rank, with copies.
	SlotsPerRank int
	// Copies records how the number of copies was chosen; nil if the number was given.
	Copies *solver.Copies
	// BatchTokens are the batch sizes that the plan was made for.
	BatchTokens []int32
}

// maxWhy is the maximum length of an explanation, in bytes.
const maxWhy = 512

// defaultGainPercent is the minimum gain for a spec without one.
const defaultGainPercent = 2

// Of computes the advice.
func Of(in Input) Advice {
	moed := in.Moed
	a := Advice{Namespace: moed.Namespace, Name: moed.Name, Plan: in.ShortDigest, InService: in.ShortDigest == moed.Status.PlanDigest, BatchTokens: in.BatchTokens}
	if in.Hardware != nil {
		a.Hardware = in.Hardware.Name
	}
	if status := moed.Status.BatchTokens; status != nil {
		if len(status.Observed) > 0 {
			a.BatchTokens, a.Observed = status.Observed, true
		} else if len(a.BatchTokens) == 0 {
			a.BatchTokens = status.Sizes
		}
	}
	a.Items = []Item{overlap(in, a), copies(in), {
		Setting: "spec.parallelism", Verdict: NotModelled,
		Now: fmt.Sprintf("%d ranks, %s", moed.Spec.Parallelism.ExpertParallelSize, moed.Spec.Parallelism.Attention),
		Why: "another number of ranks or attention mode needs another plan; compare with semmoe solve --ep on a trace",
	}}
	for _, item := range a.Items {
		if item.Verdict == Change {
			a.Patch = item.patch
		}
	}
	return a
}

// overlap compares two micro-batches with none, at the batch sizes.
func overlap(in Input, a Advice) Item {
	moed := in.Moed
	present := ptr.Deref(moed.Spec.Engine.Overlap, semmoev1.OverlapSpec{})
	item := Item{Setting: engine.OverlapField, Now: overlapText(present)}
	verdict := func(v Verdict, format string, args ...any) Item {
		item.Verdict, item.Why = v, printable.Line(fmt.Sprintf(format, args...), maxWhy) // errors quote arguments of the user
		return item
	}
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	ranks := int(moed.Spec.Parallelism.ExpertParallelSize)
	switch {
	case err != nil:
		return verdict(Unsupported, "%v", err)
	case in.Schedule == nil || in.Hardware == nil:
		return verdict(NotModelled, "the plan has no schedule: its profile does not contain the sizes of the model, or it has one rank")
	case in.Schedule.Ranks != ranks:
		return verdict(NotModelled, "the plan is for %d ranks, and the spec has %d", in.Schedule.Ranks, ranks)
	case len(a.BatchTokens) == 0:
		return verdict(NotModelled, "no batch size is known: engines report none, and the plan was made for none")
	}
	lar := in.Schedule.LAR
	if !a.InService {
		lar = 1 / float64(ranks)
	}
	m, err := in.Schedule.MicroBatches(in.Hardware, in.SlotsPerRank, lar)
	if err != nil {
		return verdict(NotModelled, "%v", err)
	}
	split := semmoev1.OverlapSpec{MicroBatches: 2, CommunicationSMs: present.CommunicationSMs, DistributionThresholdPercent: present.DistributionThresholdPercent}
	thresholds := adapter.OverlapThresholds
	if thresholds != nil {
		if from := m.Threshold(2, minSaved); from > 0 {
			split.DecodeThresholdTokens, split.PrefillThresholdTokens = int32(from), int32(from)
		}
	}
	none := semmoev1.OverlapSpec{CommunicationSMs: present.CommunicationSMs}
	item.Before = mean(m, a.BatchTokens, ranks, present, thresholds)
	best := none
	if present.MicroBatches == 0 || mean(m, a.BatchTokens, ranks, split, thresholds) < mean(m, a.BatchTokens, ranks, none, thresholds) {
		best = split
	}
	item.After = mean(m, a.BatchTokens, ranks, best, thresholds)
	saved, least := 1-item.After/item.Before, float64(ptr.Deref(moed.Spec.Rollout.MinimumGainPercent, defaultGainPercent))/100
	if best == present || saved < max(least, minSaved) {
		return verdict(Keep, "with %s the modelled time of a layer changes by %+.1f%%; a change is advised from -%.0f%%", overlapText(best), 100*(item.After/item.Before-1), 100*max(least, minSaved))
	}
	if err := supports(adapter, moed, best); err != nil {
		item.After = 0
		return verdict(Unsupported, "%v", err)
	}
	item.Advised, item.patch = overlapText(best), overlapPatch(present, best)
	return verdict(Change, "the exchange of a micro-batch overlaps the products of the other one")
}

// minSaved is the minimum relative saving that is advised for a minimum gain of 0, and at which a threshold is set.
const minSaved = 0.01

// mean returns the mean modelled time over batch sizes, which have equal weights. Engines with thresholds split only
// steps from the threshold for decoding; steps with prompts are larger.
func mean(m *schedule.MicroBatches, sizes []int32, ranks int, o semmoev1.OverlapSpec, thresholds *engine.OverlapThresholds) float64 {
	sum := 0.0
	for _, size := range sizes {
		tokens, batches := (int(size)+ranks-1)/ranks, max(1, int(o.MicroBatches))
		if thresholds != nil && tokens < int(cmp.Or(o.DecodeThresholdTokens, thresholds.Decode)) {
			batches = 1
		}
		sum += m.Time(tokens, batches) / float64(len(sizes))
	}
	return sum
}

// supports returns why the engine does not support overlap settings with the present arguments, or nil.
func supports(adapter engine.Adapter, moed *semmoev1.MoEDeployment, o semmoev1.OverlapSpec) error {
	spec := moed.Spec
	launch := engine.Launch{
		ModelPath: spec.Model.Path, Ranks: spec.Parallelism.ExpertParallelSize, AttentionDP: spec.Parallelism.Attention == semmoev1.AttentionDataParallel,
		Nodes: ptr.Deref(spec.Parallelism.PodsPerReplica, 1), Options: spec.Engine.Options, Overlap: o,
	}
	if launch.Nodes == 1 {
		launch.Nodes = 0
	}
	situation := engine.Situation{Launch: launch, UserArgs: spec.Engine.Args, Release: adapter.ImageRelease(spec.Engine.Image)}
	if serving := moed.Status.Serving; serving != nil && engine.ParseRelease(serving.EngineRelease).Known() {
		situation.Release = engine.ParseRelease(serving.EngineRelease)
	}
	if moed.Status.Model != nil {
		situation.Family = moed.Status.Model.Family
	}
	for _, variable := range spec.Engine.Env {
		situation.UserEnv = append(situation.UserEnv, variable.Name)
	}
	if err := adapter.ValidateOverlap(situation); err != nil {
		return err
	}
	_, err := adapter.Args(launch, spec.Engine.Args)
	return err
}

// overlapPatch returns a merge patch of the overlap: members that the best value lacks are removed.
func overlapPatch(present, best semmoev1.OverlapSpec) map[string]any {
	var value any
	if best != (semmoev1.OverlapSpec{}) {
		members := map[string]any{}
		for _, member := range []struct {
			name      string
			was, want int32
		}{
			{"microBatches", present.MicroBatches, best.MicroBatches},
			{"decodeThresholdTokens", present.DecodeThresholdTokens, best.DecodeThresholdTokens},
			{"prefillThresholdTokens", present.PrefillThresholdTokens, best.PrefillThresholdTokens},
		} {
			switch {
			case member.want != member.was && member.want == 0:
				members[member.name] = nil
			case member.want != member.was:
				members[member.name] = member.want
			}
		}
		if present.DistributionThresholdPercent != nil && best.DistributionThresholdPercent == nil {
			members["distributionThresholdPercent"] = nil
		}
		value = members
	}
	return map[string]any{"spec": map[string]any{"engine": map[string]any{"overlap": value}}}
}

// overlapText describes overlap settings.
func overlapText(o semmoev1.OverlapSpec) string {
	if o.MicroBatches == 0 {
		return "no micro-batches"
	}
	text := fmt.Sprintf("%d micro-batches", o.MicroBatches)
	if o.DecodeThresholdTokens > 0 {
		text += fmt.Sprintf(" from %d tokens of a rank", o.DecodeThresholdTokens)
	}
	return text
}

// copies reports how the number of copies of experts was chosen.
func copies(in Input) Item {
	moed := in.Moed
	item := Item{Setting: "spec.placement.redundantExperts", Now: "none"}
	if r := moed.Spec.Placement.RedundantExperts; r != nil {
		item.Now = r.String()
	}
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	switch {
	case err == nil && adapter.ExpertMap == nil:
		item.Verdict, item.Why = Unsupported, adapter.Type+" reads no expert map, and a permuted checkpoint contains each expert once"
	case in.Copies == nil || len(in.Copies.Points) == 0:
		item.Verdict, item.Why = NotModelled, "the plan compared no numbers of copies; redundantExperts Auto with redundantMemoryBytes compares them for the next plan"
	default:
		for _, point := range in.Copies.Points {
			switch point.RedundantSlots {
			case in.Copies.Chosen:
				item.Before = point.LayerUS
			case 0:
				item.After = point.LayerUS
			}
		}
		var compared []string
		for _, point := range in.Copies.Points {
			compared = append(compared, fmt.Sprintf("%d: %.0f µs", point.RedundantSlots, point.LayerUS))
		}
		item.Verdict, item.Why = Keep, fmt.Sprintf("the plan has the best of the compared copies per rank and layer (%s)", strings.Join(compared, ", "))
	}
	return item
}
