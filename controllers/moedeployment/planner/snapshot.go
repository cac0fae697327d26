// SPDX-License-Identifier: Apache-2.0

package planner

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/revisions"
	"github.com/semmoe/operator/internal/calibration/machines"
	"github.com/semmoe/operator/internal/model/checkpoint"
)

// Snapshot contains everything that decisions on profiles, plans and tables are based on.
type Snapshot struct {
	// Now is the time of the snapshot.
	Now  time.Time
	Moed *semmoev1.MoEDeployment
	// Report is the result of the model's inspection; nil if unknown. Decide needs it, InService does not.
	Report *checkpoint.Report
	// Workloads are the workloads of all revisions, newest first. Pods are the pods that serve requests.
	Workloads []*revisions.Workload
	Pods      []*corev1.Pod
	// BatchSizes are the sizes that engines report; nil if they report none, or if the spec sets a size.
	BatchSizes []int32

	// Profiles and Plans are the MoEDeployment's own objects, Plans newest first.
	Profiles []*semmoev1.AffinityProfile
	Plans    []*semmoev1.PlacementPlan
	// NamedProfiles and NamedPlans are objects of any owner that were read by name; nil values do not exist.
	NamedProfiles map[string]*semmoev1.AffinityProfile
	NamedPlans    map[string]*semmoev1.PlacementPlan
	// OtherPlans are the plans of the namespace, once they were asked for.
	OtherPlans *[]*semmoev1.PlacementPlan
	// Hardware is the hardware profile in the spec; HardwareFault is why it cannot be used, or nil.
	Hardware      machines.ResolvedProfile
	HardwareFault *machines.ProfileError
	// Tables is the ConfigMap that selects the tables of routers; nil if there is none.
	Tables *corev1.ConfigMap
	// StoredOutputs are the ConfigMaps with baseline outputs, of the current and of earlier checkpoints.
	StoredOutputs []*corev1.ConfigMap

	// SpecLatest, References and Outputs are the answers to questions; nil if not asked.
	SpecLatest *bool
	References *ReferenceSet
	Outputs    *RecordedOutputs
	// OverlapModels are the models of plans, by digest, once they were asked for.
	OverlapModels map[string]OverlapModelOf
	// TablesRefused reports that the API server refused the ConfigMap of the tables. Undeletable are the names of
	// the profiles whose deletion it refused.
	TablesRefused bool
	Undeletable   map[string]bool
}

// RecordedOutputs is the result of recording the model's baseline outputs. The zero value reports that they are stored.
type RecordedOutputs struct {
	// Missing is why they are not stored. Again is the delay until the next attempt; zero if an event triggers it.
	Missing string
	Again   time.Duration
	// Refused is the rejection of the ConfigMap by the API server.
	Refused error
}

// Question is a read that depends on a decision: one of the types below. Decide returns at its first question, and is
// called again once the answer is part of the snapshot. Reads that every decision needs are part of the snapshot from
// the start.
type Question any

type (
	// PlanNamed and ProfileNamed ask for an object of any owner.
	PlanNamed    struct{ Name string }
	ProfileNamed struct{ Name string }
	// EveryPlan asks for the plans of the namespace. It is asked only if an unknown plan is in use: with one plan per
	// MoEDeployment, the cost would grow with the square of their number.
	EveryPlan struct{}
	// LatestSpec asks whether the spec is the latest one. It is asked before an object is deleted: caches of different
	// kinds are not synchronized, and an object may appear before the spec that it was created for.
	LatestSpec struct{}
	// ReferencesOfOthers asks which profiles and plans other objects need, including the ConfigMaps that pods mount if
	// Pods is set. It is asked only if there is something to delete.
	ReferencesOfOthers struct{ Pods bool }
	// BaselineOutputs asks for the model's outputs from a pod. The answer is stored before the question returns: the
	// workload of a candidate must not be created before the outputs exist that its pods wait for.
	BaselineOutputs struct{ Pod *corev1.Pod }
)
