// SPDX-License-Identifier: Apache-2.0

package placementplan

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"runtime/debug"
	"time"

	"github.com/go-logr/logr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/plan"
	"github.com/semmoe/operator/internal/plan/bundle"
	"github.com/semmoe/operator/internal/profile"
	"github.com/semmoe/operator/solver"
	"github.com/semmoe/operator/solver/cost/hardware"
	"github.com/semmoe/operator/solver/embedding"
	"github.com/semmoe/operator/solver/placement"
	"github.com/semmoe/operator/solver/trace"
)

const (
	// maxTraceBytes bounds an uncompressed trace. It is ten times the largest sample that a profile takes of any known
	// model at the default settings.
	maxTraceBytes = 4 << 30
	// memoryPerTrace is the memory that a manager needs per byte of a trace. Nine bytes were measured during a solve. A
	// manager that is killed for its memory would be killed again by the same plan.
	memoryPerTrace = 16
	// maxTokenizerBytes bounds a tokenizer. The largest known tokenizers have about 35 MB.
	maxTokenizerBytes = 256 << 20
)

// invalidError is an error of the inputs. Solving again does not help.
type invalidError struct{ reason, message string }

func (e *invalidError) Error() string { return e.message }

func invalidf(reason, format string, args ...any) *invalidError {
	return &invalidError{reason, fmt.Sprintf(format, args...)}
}

// invalidRanks returns the error for an EP size that does not divide the number of experts.
func invalidRanks(err error) *invalidError {
	return invalidf("InvalidExpertParallelSize", "spec.expertParallelSize: %v. The spec is immutable: create another plan", err)
}

// task solves and publishes one plan.
type task struct {
	client *access.Client
	scope  artifact.Scope // scope of the profile
	prior  artifact.Scope // scope of the profile of the plan in service, if the inputs name one
	engine semmoev1.EngineType
	inputs solveInputs
	// machines is the hardware profile that the inputs name; nil for the default profile.
	machines *hardware.Profile
	now      func() time.Time
	// memory is the maximum memory of the task, in bytes.
	memory int64
}

// run solves the plan and publishes it, unless a plan of the same inputs has been published in the meantime.
func (t *task) run(ctx context.Context, report func(step string, done, total int)) error {
	log := logr.FromContextOrDiscard(ctx)
	namespace := t.scope.Namespace
	known, err := fetchSolution(ctx, t.client, namespace, t.inputs.ID())
	if err != nil {
		return err
	}
	if known != nil {
		if complete, err := bundle.Complete(ctx, t.client, namespace, known.PlanDigest); err != nil || complete {
			return err
		}
	}
	begin := t.now()
	report("Reading the profile", 0, 1)
	manifest, err := profile.FetchManifest(ctx, t.client, t.scope, t.inputs.Profile)
	if err != nil {
		return fmt.Errorf("failed to read the profile: %w", err)
	}
	// A trace and the tables that are made from it can have hundreds of megabytes, and the next solve may be days
	// later.
	defer debug.FreeOSMemory()
	found, replan, err := t.find(ctx, manifest, report)
	if err != nil {
		return err
	}
	report("Publishing", 0, 1)
	encoded, err := plan.Encode(found.Plan)
	if err != nil {
		return err
	}
	if _, err := dataOf(encoded, t.engine); err != nil {
		return err
	}
	tokenizer, err := t.tokenizer(ctx, manifest)
	if err != nil {
		return err
	}
	if err := bundle.Publish(ctx, t.client, namespace, encoded, tokenizer); err != nil {
		return err
	}
	result := &solution{
		Format: solutionFormat, Inputs: t.inputs, PlanDigest: encoded.Digest, ModelDigest: manifest.ModelDigest,
		FallBack: found.FallBack, Truncated: found.Truncated, TrainRequests: found.TrainRequests, TestRequests: found.TestRequests,
		Seconds: t.now().Sub(begin).Seconds(), Report: found.Report, Replan: replan,
	}
	if found.Unplanned != nil {
		result.UnplannedRemoteRanks = found.Unplanned.RemoteRanksPerToken
	}
	if w := found.Worth; w != nil {
		result.LayerNanos, result.UnplannedLayerNanos, result.Worth = nanos(w.LayerUS), nanos(w.BaselineLayerUS), w
	}
	result.BatchRates = found.BatchRates
	result.Chosen, result.Copies, result.Neighbours = found.Plan.Chosen, found.Plan.Copies, found.Neighbours
	result.Forecast, result.Forecasts = found.Plan.Forecast, found.Forecasts
	if err := publishSolution(ctx, t.client, namespace, result, known); err != nil {
		return err
	}
	log.Info("Solved a plan", "namespace", namespace, "plan", encoded.Digest, "inputs", t.inputs.ID(), "seconds", result.Seconds,
		"lar", result.Report.LAR, "baseline", result.Report.BaselineLAR, "truncated", result.Truncated)
	return nil
}

// memoryShare returns the share of one task in the memory limit of the process. The tasks of all workers fit together.
func memoryShare(workers int) int64 { return debug.SetMemoryLimit(-1) / int64(max(1, workers)) }

// traceBound returns the size of the largest uncompressed trace that fits a memory limit, in bytes.
func traceBound(memoryLimit int64) int64 { return min(maxTraceBytes, memoryLimit/memoryPerTrace) }

// find solves a plan, or a plan that replaces the plan in service.
func (t *task) find(ctx context.Context, manifest profile.Manifest, report func(step string, done, total int)) (*solver.Solution, *replanned, error) {
	if t.inputs.Replan != nil {
		return t.replan(ctx, manifest, report)
	}
	if !manifest.HasTrace() {
		return nil, nil, invalidf("ProfileInvalid", "The profile contains live counts and no routing trace, so it only supports plans with spec.current. Set spec.current, or use a profile of a data set or of sequences")
	}
	found, err := t.solve(ctx, manifest, report)
	return found, nil, err
}

// solve reads the trace and solves the plan. Only the plan and its score outlive the call.
func (t *task) solve(ctx context.Context, manifest profile.Manifest, report func(step string, done, total int)) (*solver.Solution, error) {
	recorded, err := t.recorded(ctx, t.scope, manifest, traceBound(t.memory))
	if err != nil {
		return nil, err
	}
	if err := placement.CheckRanks(t.inputs.Ranks, recorded.Model.Experts); err != nil {
		return nil, invalidRanks(err)
	}
	if err := placement.CheckSlots(t.inputs.Algorithm, t.inputs.Ranks, recorded.Model.Experts, t.inputs.RedundantSlots); err != nil {
		return nil, invalidf("InvalidPlacement", "spec.redundantExperts: %d is invalid: %v. The spec is immutable: create another plan", t.inputs.RedundantSlots*t.inputs.Ranks, err)
	}
	options := t.options(report)
	if err := solver.CheckForecast(options.Forecast, options.Ranks, recorded); err != nil {
		return nil, forecastUnavailable(options.Forecast, err)
	}
	if err := solver.Check(recorded, options); err != nil && !trace.IsInvalid(err) {
		return nil, invalidf("InvalidPlacement", "spec: %v. The spec is immutable: create another plan", err)
	}
	if options.Embeddings, err = t.embeddings(ctx, recorded.Model.Vocabulary, origin{t.scope, &manifest}); err != nil {
		return nil, err
	}
	found, err := solver.Solve(ctx, recorded, options)
	if trace.IsInvalid(err) {
		return nil, invalidf("ProfileInvalid", "routing trace of the profile: %v", err)
	}
	if err != nil || t.inputs.Unshuffled {
		return found, err // the rate depends only on the number of ranks, so drift of the traffic cannot change it
	}
	report("Calibrating the drift test", 0, 1)
	if found.Plan.Drift, err = solver.CalibrateDrift(ctx, recorded, found.Plan, found.HeldOut, t.loadCap()); err != nil {
		return nil, err
	}
	if recorded.Model.HiddenSize > 0 {
		if found.Worth, err = solver.WorthOf(ctx, recorded, found, options, t.inputs.minimumGainPercent()); err != nil {
			return nil, err
		}
	}
	if found.BatchRates, err = solver.BatchRates(ctx, recorded, found, options); err != nil {
		return nil, err
	}
	return found, t.addSchedule(recorded, found.Plan, found.Report.LAR)
}

func (t *task) options(report func(step string, done, total int)) solver.Options {
	o := t.inputs.options(report)
	o.Hardware = t.machines
	return o
}

// addSchedule adds the schedule of the work inside layers, for the machines of the plan.
func (t *task) addSchedule(recorded *trace.Trace, p *solver.Plan, lar float64) (err error) {
	p.Schedule, err = solver.ScheduleLayers(&recorded.Model, p, lar, p.Machines(), t.inputs.RanksPerNode)
	return err
}

// recorded reads the routing trace of a profile, of at most bound bytes, and checks that its model is the model of the
// profile.
func (t *task) recorded(ctx context.Context, scope artifact.Scope, manifest profile.Manifest, bound int64) (*trace.Trace, error) {
	recorded, err := t.trace(ctx, scope, manifest, bound)
	if trace.IsInvalid(err) {
		return nil, invalidf("ProfileInvalid", "routing trace of the profile: %v (the memory limit of the manager, %d bytes per solver worker, allows %d bytes: raise resources.limits.memory, chart value manager.resources.limits.memory)", err, t.memory, bound)
	}
	if err != nil {
		return nil, fmt.Errorf("failed to read the routing trace of the profile: %w", err)
	}
	if digest := recorded.Model.Digest; digest != "" && digest != manifest.ModelDigest {
		return nil, invalidf("ProfileInvalid", "routing trace of the profile: it is of model %q, but the profile is of %q", digest, manifest.ModelDigest)
	}
	recorded.Model.Digest = manifest.ModelDigest
	return recorded, nil
}

// trace reads the routing trace while it arrives from the store.
func (t *task) trace(ctx context.Context, scope artifact.Scope, manifest profile.Manifest, maxBytes int64) (*trace.Trace, error) {
	stream, err := t.client.Get(ctx, scope, manifest.Files[profile.TraceFile])
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	recorded, err := trace.Read(stream, maxBytes)
	// The content counts only if its digest was verified to the end. Otherwise an error in it is an error of the
	// transfer.
	if _, rest := io.Copy(io.Discard, stream); rest != nil {
		return nil, rest
	}
	return recorded, err
}

// origin is a profile in the artifact store; the manifest is nil without one.
type origin struct {
	scope    artifact.Scope
	manifest *profile.Manifest
}

// embeddings reads the token embeddings of the first of the profiles that has some. It returns nil if none has. A plan
// does not need them, so embeddings that are damaged, or that the store has lost, are logged.
func (t *task) embeddings(ctx context.Context, vocabulary int, from ...origin) (*embedding.Table, error) {
	for _, s := range from {
		if s.manifest == nil || t.inputs.Unshuffled {
			continue
		}
		found, err := profile.FetchEmbeddings(ctx, t.client, s.scope, *s.manifest, vocabulary)
		var invalid *profile.EmbeddingsError
		switch {
		case errors.As(err, &invalid), errors.Is(err, artifact.ErrNotFound), errors.Is(err, artifact.ErrCorrupt):
			logr.FromContextOrDiscard(ctx).Info("Solving without token embeddings", "profile", s.scope.String(), "reason", err.Error())
		case err != nil:
			return nil, err
		case found != nil:
			return found, nil
		}
	}
	return nil, nil
}

// tokenizer reads the tokenizer of the checkpoint. It returns nil if the profile has none.
func (t *task) tokenizer(ctx context.Context, manifest profile.Manifest) (io.Reader, error) {
	digest, has := manifest.Files[profile.TokenizerFile]
	if !has {
		return nil, nil
	}
	content, err := t.client.ReadAll(ctx, t.scope, digest, maxTokenizerBytes)
	if err != nil {
		return nil, fmt.Errorf("failed to read the tokenizer of the profile: %w", err)
	}
	return bytes.NewReader(content), nil
}
