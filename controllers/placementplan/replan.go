// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"cmp"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"

	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/internal/profile/counts"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/affinity"
	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

// replanInputs contains the additional inputs of a plan that replaces the plan in service.
type replanInputs struct {
	// Plan is the digest of the plan that the pods were created for. Tables is the digest of the plan whose tables are
	// used, and is empty if it is Plan.
	Plan   string `json:"plan"`
	Tables string `json:"tables,omitempty"`
	// Prior is the digest of the result of the profile of the plan in service; empty if the spec names none.
	Prior              artifact.Digest `json:"prior,omitempty"`
	TargetLARMilli     int             `json:"targetLARMilli,omitempty"`
	MinimumGainPercent int             `json:"minimumGainPercent"`
}

// replanInputsOf returns the inputs of a plan that replaces the plan in service; nil if it replaces none.
func replanInputsOf(p *semmoev1.PlacementPlan, prior artifact.Digest) *replanInputs {
	current := p.Spec.Current
	if current == nil {
		return nil
	}
	return &replanInputs{
		Plan: current.PlanDigest, Tables: current.TablesDigest, Prior: prior, TargetLARMilli: int(current.TargetLARMilli),
		MinimumGainPercent: int(ptr.Deref(p.Spec.MinimumGainPercent, 0)),
	}
}

// replanned is the comparison of a plan with the plan in service.
type replanned struct {
	solver.Decision
	Current   solver.Score `json:"current"`
	Candidate solver.Score `json:"candidate"`
	Moves     int          `json:"moves"`
	Requests  int          `json:"requests"`
	// Hardware is the name of the hardware profile that models the times.
	Hardware string `json:"hardware,omitempty"`
}

// tiers maps the tiers of the solver to those of the API.
var tiers = map[solver.Tier]semmoev1.Tier{solver.TablesTier: semmoev1.TierTables, solver.LayoutTier: semmoev1.TierLayout}

func (r *replanned) tier() semmoev1.Tier {
	if r == nil {
		return ""
	}
	return tiers[r.Decision.Tier]
}

func (r *replanned) comparison() *semmoev1.PlanComparison {
	if r == nil {
		return nil
	}
	comparison := &semmoev1.PlanComparison{
		CurrentLARMilli: rate(r.Current.LAR), CandidateLARMilli: rate(r.Candidate.LAR),
		CurrentNanos: nanos(r.Current.Total()), CandidateNanos: nanos(r.Candidate.Total()),
		MovedExperts: int32(r.Moves), Requests: int32(r.Requests), Reason: printable.Line(r.Reason, 512),
	}
	if comparison.CurrentNanos > 0 {
		comparison.Hardware = printable.Line(r.Hardware, maxHardware)
	}
	return comparison
}

// nanos converts a modelled time from microseconds to nanoseconds. It returns 0 if the profile does not contain the
// sizes of the model.
func nanos(us float64) int64 {
	if us > 0 && us < math.MaxInt32 {
		return int64(math.Round(1000 * us))
	}
	return 0
}

// replan makes a plan that replaces the plan in service. If no change is worthwhile, the result is the new placement,
// and its verdict is NoGainExpected.
func (t *task) replan(ctx context.Context, manifest profile.Manifest, report func(step string, done, total int)) (*solver.Solution, *replanned, error) {
	report("Reading the plan in service", 0, 1)
	current, encoded, err := t.current(ctx)
	if err != nil {
		return nil, nil, err
	}
	prior, err := t.priorManifest(ctx)
	if err != nil {
		return nil, nil, err
	}
	var recent *trace.Trace
	var found *solver.Replanned
	if err := t.checkCounts(manifest, current); err != nil {
		return nil, nil, err
	}
	if manifest.HasTrace() {
		recent, found, err = t.replanFromTraces(ctx, manifest, prior, current, report)
	} else {
		found, err = t.replanFromCounts(ctx, manifest, prior, current, report)
	}
	switch {
	case errors.Is(err, solver.ErrTooFewRequests):
		return nil, nil, invalidf("TooFewRequests", "profile: %v", err)
	case trace.IsInvalid(err):
		return nil, nil, invalidf("ProfileInvalid", "routing trace of the profile: %v", err)
	case err != nil:
		return nil, nil, err
	}
	chosen := found.Layout
	if found.Decision.Tier == solver.TablesTier || chosen.Plan == nil { // counts may give no new layout
		chosen = found.Tables
		if err := plan.OnLayoutOf(chosen.Plan, encoded); err != nil {
			return nil, nil, err
		}
	}
	result := &replanned{found.Decision, found.Current.Score, chosen.Score, chosen.Moves, found.TestRequests, chosen.Plan.Machines().Name}
	if recent == nil {
		if reflect.DeepEqual(chosen.Plan.Machines(), current.Machines()) {
			// The inputs of the schedule are those of the plan in service, except for the rate, on which it hardly
			// depends.
			chosen.Plan.Schedule = current.Schedule
		}
		return &solver.Solution{
			Plan: chosen.Plan, Truncated: found.Truncated, Neighbours: chosen.Neighbours, Forecasts: t.inputs.forecastChoice(current, chosen.Plan),
		}, result, nil
	}
	solution, err := t.scored(ctx, recent, chosen, found)
	if err != nil {
		return nil, nil, err
	}
	solution.Forecasts = t.inputs.forecastChoice(current, chosen.Plan)
	return solution, result, nil
}

// current reads the plan in service: the placement of the pods, with the tables that routers use.
func (t *task) current(ctx context.Context) (*solver.Plan, *plan.Artifact, error) {
	in := t.inputs.Replan
	digest := cmp.Or(in.Tables, in.Plan)
	current, encoded, err := bundle.FetchPlan(ctx, t.client, t.scope.Namespace, digest)
	switch {
	case errors.Is(err, artifact.ErrNotFound):
		return nil, nil, invalidf("CurrentPlanLost", "spec.current: the artifact store has lost plan %s: %v", digest, err)
	case plan.IsInvalid(err):
		return nil, nil, invalidf("CurrentPlanInvalid", "spec.current: %v", err)
	case err != nil:
		return nil, nil, fmt.Errorf("failed to read the plan in service: %w", err)
	case in.Tables != "" && encoded.Manifest.Layout != in.Plan:
		return nil, nil, invalidf("CurrentPlanInvalid", "spec.current.tablesDigest: plan %s is for the layout of plan %q, not of spec.current.planDigest", in.Tables, encoded.Manifest.Layout)
	}
	return current, encoded, t.inputs.succeeds(current)
}

// succeeds returns an error if the plan in service has another objective or number of copies. A new plan keeps both.
func (i *solveInputs) succeeds(current *solver.Plan) error {
	p := current.Placement
	slots, objective := p.SlotsPerRank-p.Experts/p.Ranks, cmp.Or(current.Objective, placement.Activation)
	switch {
	case i.Objective != "" && i.Objective != objective:
		return invalidf("CurrentPlanInvalid", "spec.objective: the plan in service has objective %s, not %s. Omit objective, or create a plan without spec.current", objective, i.Objective)
	case i.RedundantSlots != slots:
		return invalidf("CurrentPlanInvalid", "spec.redundantExperts: the plan in service has %d, not %d. Set the same number, or create a plan without spec.current", slots*p.Ranks, i.RedundantSlots*i.Ranks)
	}
	return nil
}

// priorManifest reads the manifest of the profile of the plan in service. It returns nil if the inputs name none.
func (t *task) priorManifest(ctx context.Context) (*profile.Manifest, error) {
	if t.inputs.Replan.Prior == "" {
		return nil, nil
	}
	manifest, err := profile.FetchManifest(ctx, t.client, t.prior, t.inputs.Replan.Prior)
	if err != nil {
		return nil, fmt.Errorf("failed to read the profile of the plan in service: %w", err)
	}
	return &manifest, nil
}

// replanFromTraces solves from the recent routing trace and, if it exists, the trace of the prior profile. Each may
// take half of the memory.
func (t *task) replanFromTraces(ctx context.Context, manifest profile.Manifest, before *profile.Manifest, current *solver.Plan, report func(string, int, int)) (*trace.Trace, *solver.Replanned, error) {
	bound := traceBound(t.memory) / 2
	recent, err := t.recorded(ctx, t.scope, manifest, bound)
	if err != nil {
		return nil, nil, err
	}
	var prior *trace.Trace
	if before != nil && before.HasTrace() {
		if prior, err = t.recorded(ctx, t.prior, *before, bound); err != nil {
			return nil, nil, err
		}
	}
	options := t.replanOptions(report)
	if options.Forecast, err = t.inputs.forecastAfter(current, recent); err != nil {
		return nil, nil, err
	}
	if options.Embeddings, err = t.embeddings(ctx, current.Vocabulary, origin{t.scope, &manifest}, origin{t.prior, before}); err != nil {
		return nil, nil, err
	}
	found, err := solver.Replan(ctx, recent, prior, current, options)
	return recent, found, err
}

// replanFromCounts solves from the counts of the profile and of the prior profile.
func (t *task) replanFromCounts(ctx context.Context, manifest profile.Manifest, before *profile.Manifest, current *solver.Plan, report func(string, int, int)) (*solver.Replanned, error) {
	recent, err := t.counted(ctx, t.scope, manifest)
	if err != nil {
		return nil, err
	}
	digest, err := hex.DecodeString(string(manifest.Files[profile.CountsFile]))
	if err != nil {
		return nil, err
	}
	var prior []affinity.Counts
	if before != nil {
		if prior, err = t.counted(ctx, t.prior, *before); err != nil {
			return nil, err
		}
	}
	groups := 0
	if manifest.Live != nil {
		if groups, err = manifest.Live.Model.Groups(); err != nil {
			return nil, invalidf("ProfileInvalid", "%v", err)
		}
	}
	counted := solver.CountedProfile{Layers: recent, Groups: groups}
	copy(counted.Digest[:], digest)
	options := t.replanOptions(report)
	if options.Embeddings, err = t.embeddings(ctx, current.Vocabulary, origin{t.scope, &manifest}, origin{t.prior, before}); err != nil {
		return nil, err
	}
	return solver.ReplanCounts(ctx, counted, prior, current, options)
}

// counted reads the counts of a profile.
func (t *task) counted(ctx context.Context, scope artifact.Scope, manifest profile.Manifest) ([]affinity.Counts, error) {
	stream, err := t.client.Get(ctx, scope, manifest.Files[profile.CountsFile])
	if err != nil {
		return nil, fmt.Errorf("failed to read the counts of %s: %w", scope, err)
	}
	defer stream.Close()
	counted, err := counts.ReadCompressed(stream, traceBound(t.memory)/2)
	// The content counts only if its digest was verified to the end. Otherwise an error in it is an error of the
	// transfer.
	if _, rest := io.Copy(io.Discard, stream); rest != nil {
		return nil, fmt.Errorf("failed to read the counts of %s: %w", scope, rest)
	}
	if err != nil {
		return nil, invalidf("ProfileInvalid", "counts of %s: %v (the memory limit of the manager, %d bytes per solver worker, allows %d bytes: raise resources.limits.memory, chart value manager.resources.limits.memory)", scope, err, t.memory, traceBound(t.memory)/2)
	}
	if digest := counted.Model.Digest; digest != "" && digest != manifest.ModelDigest {
		return nil, invalidf("ProfileInvalid", "counts of %s: they are of model %q, but the profile is of %q", scope, digest, manifest.ModelDigest)
	}
	return counted.Layers(), nil
}

func (t *task) replanOptions(report func(step string, done, total int)) solver.ReplanOptions {
	in := t.inputs.Replan
	return solver.ReplanOptions{
		Options: t.options(report), MoveGainPercent: solver.DefaultMoveGainPercent, PriorPercent: solver.DefaultPriorPercent,
		ReplanPolicy: solver.ReplanPolicy{
			BatchTokens: t.inputs.batchSizes(), MinimumGainPercent: float64(in.MinimumGainPercent), TargetLAR: float64(in.TargetLARMilli) / 1000,
		},
	}
}

// checkCounts returns an error for a profile of counts if the plan in service, or the new plan, needs more.
func (t *task) checkCounts(manifest profile.Manifest, current *solver.Plan) error {
	named := t.inputs.Forecast
	if named == solver.AutoForecast {
		named = current.Forecast
	}
	for _, by := range []solver.Forecast{named, current.Forecast} {
		if !manifest.HasTrace() && by != solver.Table {
			return forecastUnavailable(by, errors.New("the profile contains live counts, without the order of tokens"))
		}
	}
	return nil
}

// forecastAfter returns the forecast of a plan that replaces the plan in service. With Auto it is that of the plan in
// service or, if the new profile lacks its input, Table.
func (i *solveInputs) forecastAfter(current *solver.Plan, recent *trace.Trace) (solver.Forecast, error) {
	if i.Forecast != solver.AutoForecast {
		if err := solver.CheckForecast(i.Forecast, current.Placement.Ranks, recent); err != nil {
			return "", forecastUnavailable(i.Forecast, err)
		}
		return i.Forecast, nil
	}
	if solver.CheckForecast(current.Forecast, current.Placement.Ranks, recent) != nil {
		return solver.Table, nil
	}
	return current.Forecast, nil
}

// keptForecast explains the forecast of a plan that has the one of the plan in service.
const keptForecast = "as in the plan in service"

// forecastChoice states for Auto why the new plan has its forecast.
func (i *solveInputs) forecastChoice(current, made *solver.Plan) *solver.ForecastChoice {
	switch {
	case i.Forecast != solver.AutoForecast:
		return nil
	case made.Forecast != current.Forecast:
		return &solver.ForecastChoice{Chosen: made.Forecast, Reason: fmt.Sprintf("the profile lacks the input of forecast %s of the plan in service", current.Forecast)}
	}
	return &solver.ForecastChoice{Chosen: made.Forecast, Reason: keptForecast}
}

// scored evaluates the chosen plan on the held-out requests, and calibrates its drift test.
func (t *task) scored(ctx context.Context, recent *trace.Trace, of solver.Candidate, found *solver.Replanned) (*solver.Solution, error) {
	chosen := of.Plan
	o := solver.DefaultEvaluation()
	o.Requests, o.Seed, o.Machines = found.HeldOut, chosen.Seed, cost.NodeOf(chosen.Machines())
	o.RanksPerNode = cmp.Or(chosen.RanksPerNode, o.RanksPerNode)
	o.Cap = cmp.Or(t.loadCap(), o.Cap)
	report, err := solver.Evaluate(ctx, recent, chosen, o)
	if err != nil {
		return nil, err
	}
	if chosen.Drift, err = solver.CalibrateDrift(ctx, recent, chosen, found.HeldOut, t.loadCap()); err != nil {
		return nil, err
	}
	if err := t.addSchedule(recent, chosen, report.LAR); err != nil {
		return nil, err
	}
	solution := &solver.Solution{
		Plan: chosen, Report: report, Neighbours: of.Neighbours, Truncated: found.Truncated, TrainRequests: found.TrainRequests, TestRequests: found.TestRequests,
		HeldOut: found.HeldOut,
	}
	solution.BatchRates, err = solver.BatchRates(ctx, recent, solution, t.options(nil))
	return solution, err
}

// loadCap returns the token load limit of the request routers, as a factor; 0 if the spec sets none.
func (t *task) loadCap() float64 { return float64(t.inputs.TokenLoadLimit) / 100 }
