// SPDX-License-Identifier: Apache-2.0

// Package advice computes which settings of a MoEDeployment pay by the models of its plan, and the patch that sets them.
//
// Invariants:
//   - A setting is advised only if the engine's release supports it, and the modelled time falls by at least the minimum
//     gain of the spec.
//   - The result states what is not modelled.
package advice

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/kube/podtemplate"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/plan/overlap"
	"github.com/semmoe/operator/solver"
)

// Verdict is the result for a setting.
type Verdict = overlap.Verdict

// The verdicts of package overlap.
const (
	Change      = overlap.Change
	Keep        = overlap.Keep
	Unsupported = overlap.Unsupported
	NotModelled = overlap.NotModelled
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
	// Model contains the models of the plan; nil if it has none.
	Model *overlap.Model
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
	if in.Model != nil {
		a.Hardware = in.Model.Hardware.Name
	}
	if status := moed.Status.BatchTokens; status != nil {
		if len(status.Observed) > 0 {
			a.BatchTokens, a.Observed = status.Observed, true
		} else if len(a.BatchTokens) == 0 {
			a.BatchTokens = status.Sizes
		}
	}
	a.Items = []Item{overlapItem(in, a), copies(in), {
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

// overlapItem compares two micro-batches with none, at the batch sizes.
func overlapItem(in Input, a Advice) Item {
	moed := in.Moed
	item := Item{Setting: engine.OverlapField}
	adapter, err := registry.For(string(moed.Spec.Engine.Type))
	if err != nil {
		item.Verdict, item.Why = Unsupported, err.Error()
		return item
	}
	if moed.Spec.Engine.Overlap.Chosen() {
		item.Now, item.Verdict, item.Why = "Auto", Keep, "the operator chooses the settings with each plan: see status.overlap"
		return item
	}
	present := moed.Spec.Engine.Overlap.Given()
	o := overlap.Options{
		Ranks: int(moed.Spec.Parallelism.ExpertParallelSize), BatchTokens: a.BatchTokens, Present: present,
		MinGain: float64(ptr.Deref(moed.Spec.Rollout.MinimumGainPercent, defaultGainPercent)) / 100,
		Adapter: adapter, Situation: situation(adapter, moed),
	}
	if o.LAR = 1 / float64(o.Ranks); a.InService && in.Model != nil {
		o.LAR = in.Model.Schedule.LAR
	}
	c := overlap.Choose(in.Model, o)
	item.Now, item.Verdict, item.Before, item.After, item.Why = overlap.Text(present), c.Verdict, c.Before, c.After, printable.Line(c.Why, maxWhy)
	if c.Verdict == Change {
		item.Advised, item.patch = overlap.Text(c.Values), overlapPatch(present, c.Values)
	}
	return item
}

// situation describes the engine of a spec, without overlap settings.
func situation(adapter engine.Adapter, moed *semmoev1.MoEDeployment) engine.Situation {
	spec := moed.Spec
	launch := engine.Launch{
		ModelPath: spec.Model.Path, Ranks: spec.Parallelism.ExpertParallelSize, AttentionDP: spec.Parallelism.Attention == semmoev1.AttentionDataParallel,
		Nodes: ptr.Deref(spec.Parallelism.PodsPerReplica, 1), Options: spec.Engine.Options, RoutedExperts: adapter.ReportsRoutedExperts() && sampled(moed),
	}
	if launch.Nodes == 1 {
		launch.Nodes = 0
	}
	s := engine.Situation{Launch: launch, UserArgs: spec.Engine.Args, Release: adapter.ImageRelease(spec.Engine.Image)}
	if serving := moed.Status.Serving; serving != nil && engine.ParseRelease(serving.EngineRelease).Known() {
		s.Release = engine.ParseRelease(serving.EngineRelease)
	}
	if moed.Status.Model != nil {
		s.Family = moed.Status.Model.Family
	}
	s.UserEnv = engine.UserVariables(slices.Concat(spec.Engine.Env, podtemplate.Env(spec.Template, semmoev1.EngineContainer)))
	return s
}

// sampled reports whether the spec requests the routed experts of requests: from routers, which sample them by default,
// or for a profile while the engine serves.
func sampled(moed *semmoev1.MoEDeployment) bool {
	spec := moed.Spec
	if p := spec.Profiling; p != nil && p.Dataset != nil && p.Target == semmoev1.ProfilingTargetServing {
		return true
	}
	return spec.Routing.Mode != semmoev1.RoutingModeNone && spec.Parallelism.Attention == semmoev1.AttentionDataParallel &&
		ptr.Deref(spec.Routing.SamplePercent, 1) > 0 && (spec.Profiling != nil || spec.Placement.PlanRef != nil)
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
			{"communicationSMs", present.CommunicationSMs, best.CommunicationSMs},
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
