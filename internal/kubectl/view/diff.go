// SPDX-License-Identifier: Apache-2.0

package view

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kubectl/terminal"
	"github.com/semmoe/operator/solver/placement"
)

// Side is one of two plans that are compared.
type Side struct {
	Plan      *semmoev1.PlacementPlan
	Placement *placement.Placement
}

// Difference is the difference of two plans.
type Difference struct {
	From PlanFigures `json:"from"`
	To   PlanFigures `json:"to"`
	// Moved is the number of experts that ranks must load to go from From to To, over all layers. Slots is the number
	// of slots of To.
	Moved int `json:"movedExperts"`
	Slots int `json:"slots"`
	// Bytes is an upper bound of the bytes of the moved weights; 0 if unknown.
	Bytes int64 `json:"movedBytesAtMost,omitempty"`
	// Layers splits Moved by layer of the model, and Ranks by receiving rank.
	Layers []LayerMoves `json:"layers"`
	Ranks  []int        `json:"ranks"`
	// Spec lists the spec fields that differ.
	Spec []FieldChange `json:"spec"`
}

// PlanFigures are the figures of one plan.
type PlanFigures struct {
	Name     string                 `json:"name"`
	Digest   string                 `json:"planDigest"`
	Forecast *semmoev1.PlanForecast `json:"forecast,omitempty"`
}

// LayerMoves is the number of experts that move in one layer of the model.
type LayerMoves struct {
	Layer int `json:"layer"`
	Moved int `json:"moved"`
}

// FieldChange is a spec field with its value in both plans.
type FieldChange struct {
	Field string `json:"field"`
	From  string `json:"from"`
	To    string `json:"to"`
}

// Diff compares two plans. expertBytes is an upper bound of the bytes of one expert's weights; 0 if unknown. Diff fails
// if the placements have different numbers of ranks or experts, or different MoE layers.
func Diff(from, to Side, expertBytes int64) (Difference, error) {
	a, b := from.Placement, to.Placement
	same := a.Ranks == b.Ranks && a.Experts == b.Experts && slices.EqualFunc(a.Layers, b.Layers, func(x, y placement.Layer) bool { return x.Layer == y.Layer })
	if !same {
		return Difference{}, fmt.Errorf("the plans have different shapes: %s has %d experts in %d MoE layers on %d ranks, %s has %d in %d on %d",
			from.Plan.Name, a.Experts, len(a.Layers), a.Ranks, to.Plan.Name, b.Experts, len(b.Layers), b.Ranks)
	}
	d := Difference{
		From: figuresOf(from.Plan), To: figuresOf(to.Plan), Slots: len(b.Layers) * b.Ranks * b.SlotsPerRank,
		Layers: []LayerMoves{}, Ranks: make([]int, b.Ranks), Spec: specChanges(from.Plan, to.Plan),
	}
	for l, layer := range b.Layers {
		hosts, moved := a.Hosts(l), 0
		for slot, expert := range layer.Slots {
			if rank := slot / b.SlotsPerRank; !slices.Contains(hosts[expert], rank) {
				d.Ranks[rank]++
				moved++
			}
		}
		d.Layers = append(d.Layers, LayerMoves{layer.Layer, moved})
		d.Moved += moved
	}
	d.Bytes = expertBytes * int64(d.Moved)
	return d, nil
}

func figuresOf(plan *semmoev1.PlacementPlan) PlanFigures {
	return PlanFigures{plan.Name, plan.Status.Plan, plan.Status.Forecast}
}

func specChanges(from, to *semmoev1.PlacementPlan) []FieldChange {
	changes := []FieldChange{}
	a, b := fieldsOf(from), fieldsOf(to)
	for i := range a {
		if a[i].From != b[i].From {
			changes = append(changes, FieldChange{a[i].Field, a[i].From, b[i].From})
		}
	}
	return changes
}

// fieldsOf returns the fields of a plan's spec as text, in From.
func fieldsOf(plan *semmoev1.PlacementPlan) []FieldChange {
	s := plan.Spec
	current, prior := ptr.Deref(s.Current, semmoev1.CurrentPlan{}), ptr.Deref(s.PriorProfileRef, semmoev1.ProfileReference{})
	fields := []FieldChange{}
	for _, field := range [][2]string{
		{"profileRef", s.ProfileRef.Name}, {"attention", string(s.Attention)}, {"expertParallelSize", fmt.Sprint(s.ExpertParallelSize)},
		{"engine", string(s.Engine)}, {"realization", string(s.Realization)}, {"tokenShuffle", string(s.TokenShuffle)},
		{"objective", string(s.Objective)}, {"redundantExperts", copiesText(&s.LayoutSpec)}, {"redundantMemoryBytes", memoryText(s.RedundantMemoryBytes)},
		{"tokenLoadLimitPercent", unlessNil(s.TokenLoadLimitPercent)}, {"expertLoadLimitPercent", unlessNil(s.ExpertLoadLimitPercent)},
		{"solver.algorithm", string(s.Solver.Algorithm)}, {"solver.forecast", string(s.Solver.Forecast)}, {"solver.timeBudgetSeconds", fmt.Sprint(s.Solver.TimeBudgetSeconds)},
		{"solver.seed", unlessNil(s.Solver.Seed)}, {"solver.trainPercent", fmt.Sprint(s.Solver.TrainPercent)},
		{"ranksPerNode", unlessZero(s.RanksPerNode)}, {"hardware", hardwareText(s.Hardware)}, {"hardwareDigest", artifact.Digest(s.HardwareDigest).Short()},
		{"current.planDigest", artifact.Digest(current.PlanDigest).Short()}, {"current.tablesDigest", artifact.Digest(current.TablesDigest).Short()},
		{"current.targetLARMilli", unlessZero(current.TargetLARMilli)}, {"priorProfileRef", prior.Name},
		{"minimumGainPercent", unlessNil(s.MinimumGainPercent)}, {"batchTokens", unlessZero(s.BatchTokens)}, {"observedBatchTokens", sizesText(s.ObservedBatchTokens)},
	} {
		fields = append(fields, FieldChange{Field: field[0], From: field[1]})
	}
	return fields
}

// sizesText formats batch sizes.
func sizesText(sizes []int32) string { return strings.Trim(fmt.Sprint(sizes), "[]") }

// unlessZero formats a number, and returns an empty string for 0.
func unlessZero(number int32) string {
	if number == 0 {
		return ""
	}
	return fmt.Sprint(number)
}

// unlessNil formats a number, and returns an empty string for nil.
func unlessNil[N int32 | int64](number *N) string {
	if number == nil {
		return ""
	}
	return fmt.Sprint(*number)
}

// copiesText returns the number of redundant experts in a spec, or Auto. It is empty if the spec has none.
func copiesText(s *semmoev1.LayoutSpec) string {
	if s.ChoosesRedundantExperts() {
		return semmoev1.RedundantExpertsAuto
	}
	return unlessZero(s.FixedRedundantExperts())
}

func memoryText(memory *resource.Quantity) string {
	if memory == nil {
		return ""
	}
	return memory.String()
}

func hardwareText(hardware *semmoev1.HardwareReference) string {
	switch {
	case hardware == nil:
		return ""
	case hardware.ConfigMap != nil:
		return fmt.Sprintf("ConfigMap %s, key %s", hardware.ConfigMap.Name, hardware.ConfigMap.Key)
	}
	return hardware.BuiltIn
}

// figureRows returns the figures of both plans as table rows. A figure that neither plan has is omitted. The two rates
// are always shown, because every plan that was evaluated on requests has them.
func (d Difference) figureRows() [][]terminal.Cell {
	rows := [][]terminal.Cell{{{Text: "plan"}, {Text: d.From.Digest}, {Text: d.To.Digest}}}
	add := func(name, from, to string) {
		rows = append(rows, []terminal.Cell{{Text: name}, {Text: cmp.Or(from, "unknown")}, {Text: cmp.Or(to, "unknown")}})
	}
	from, to := forecastText(d.From.Forecast), forecastText(d.To.Forecast)
	add("predicted LAR", from.rate, to.rate)
	add("without a plan", from.baseline, to.baseline)
	if from.imbalance != "" || to.imbalance != "" {
		add("busiest rank / mean", from.imbalance, to.imbalance)
	}
	if from.remote != "" || to.remote != "" {
		add("other ranks of a token", from.remote, to.remote)
	}
	return rows
}

// forecastWords are the figures of a forecast as text. Missing figures are empty.
type forecastWords struct{ rate, baseline, imbalance, remote string }

func forecastText(f *semmoev1.PlanForecast) forecastWords {
	if f == nil { // a plan that was made only from counts has no forecast
		return forecastWords{}
	}
	words := forecastWords{rate: percent(f.LARMilli), baseline: percent(f.BaselineMilli)}
	if f.WindowImbalanceMilli > 0 {
		words.imbalance = fmt.Sprintf("%.3f", float64(f.WindowImbalanceMilli)/1000)
	}
	if f.BaselineRemoteRanksMilli > 0 {
		words.remote = fmt.Sprintf("%.2f (without a plan %.2f)", float64(f.RemoteRanksMilli)/1000, float64(f.BaselineRemoteRanksMilli)/1000)
	}
	return words
}

// Text formats a difference for a terminal.
func (d Difference) Text(style terminal.Style) string {
	var out strings.Builder
	rows := d.figureRows()
	for _, change := range d.Spec {
		rows = append(rows, []terminal.Cell{{Text: "spec." + change.Field}, {Text: orNone(change.From)}, {Text: orNone(change.To)}})
	}
	out.WriteString(style.Table([]string{"", d.From.Name, d.To.Name}, rows))
	out.WriteString("\n")
	out.WriteString(style.Paragraph(terminal.Words(d.moves(), terminal.Strong), 0))
	if d.Moved == 0 {
		return out.String()
	}
	out.WriteString("\n")
	out.WriteString(style.Table([]string{"LAYER", "MOVED", ""}, countRows(d.Layers)))
	out.WriteString("\n")
	ranks := make([]LayerMoves, len(d.Ranks))
	for rank, moved := range d.Ranks {
		ranks[rank] = LayerMoves{rank, moved}
	}
	out.WriteString(style.Table([]string{"RANK", "RECEIVES", ""}, countRows(ranks)))
	return out.String()
}

// moves summarizes the number and the bytes of moved experts.
func (d Difference) moves() string {
	if d.Moved == 0 {
		return "No expert moves: the placements are equal, only the tables may differ."
	}
	text := fmt.Sprintf("Experts that move to another rank: %d of %d slots", d.Moved, d.Slots)
	if d.Bytes > 0 {
		text += fmt.Sprintf(", at most %s of weights", bytesText(d.Bytes))
	} else {
		text += "; the size of their weights is unknown"
	}
	return text + "."
}

func orNone(text string) string {
	if text == "" {
		return "none"
	}
	return text
}

// countRows returns table rows of counts, with bars relative to the largest count.
func countRows(counts []LayerMoves) [][]terminal.Cell {
	largest := 1
	for _, count := range counts {
		largest = max(largest, count.Moved)
	}
	var rows [][]terminal.Cell
	for _, count := range counts {
		rows = append(rows, []terminal.Cell{{Text: fmt.Sprint(count.Layer)}, {Text: fmt.Sprint(count.Moved)}, {Text: bar(float64(count.Moved) / float64(largest)), Tone: terminal.Faint}})
	}
	return rows
}
