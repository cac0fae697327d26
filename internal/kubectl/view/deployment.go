// SPDX-License-Identifier: Apache-2.0

package view

import (
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/kube/jobstate"
	"github.com/semmoe/operator/internal/kube/podhealth"
	"github.com/semmoe/operator/internal/kube/replicagroup"
	"github.com/semmoe/operator/internal/kubectl/gitops"
)

// Objects are the inputs of Describe. The lists may contain objects of other deployments.
type Objects struct {
	Deployment       *semmoev1.MoEDeployment
	Profiles         []semmoev1.AffinityProfile
	Plans            []semmoev1.PlacementPlan
	StatefulSets     []appsv1.StatefulSet
	LeaderWorkerSets []leaderworkersetv1.LeaderWorkerSet
	Deployments      []appsv1.Deployment
	Pods             []corev1.Pod
	Jobs             []batchv1.Job
	// NotRead names the kinds that could not be read, with the reason.
	NotRead []string
	Now     time.Time
}

// Deployment describes a MoEDeployment and the objects that belong to it.
type Deployment struct {
	Namespace string                  `json:"namespace"`
	Name      string                  `json:"name"`
	Ready     metav1.Condition        `json:"-"`
	Paused    bool                    `json:"paused"`
	OwnedBy   *gitops.Owner           `json:"ownedBy,omitempty"`
	Model     string                  `json:"model,omitempty"`
	Endpoint  string                  `json:"endpoint,omitempty"`
	Replicas  Replicas                `json:"replicas"`
	Revision  string                  `json:"revision,omitempty"`
	Plan      string                  `json:"planDigest,omitempty"`
	Pinned    string                  `json:"pinnedPlan,omitempty"`
	Locality  *semmoev1.LARStatus     `json:"lar,omitempty"`
	Drift     *semmoev1.DriftStatus   `json:"drift,omitempty"`
	Rollout   *semmoev1.RolloutStatus `json:"rollout,omitempty"`
	Profiles  []Profile               `json:"profiles"`
	Plans     []Plan                  `json:"plans"`
	Revisions []Revision              `json:"revisions"`
	Routers   *Routers                `json:"routers,omitempty"`
	Jobs      []Job                   `json:"jobs"`
	// Conditions are in the order in which the operator writes them.
	Conditions []metav1.Condition `json:"conditions"`
	// Next are the commands that the deployment waits for.
	Next    []Step   `json:"next,omitempty"`
	NotRead []string `json:"notRead,omitempty"`

	now time.Time
}

// Replicas count a deployment's replicas, or the pods of request routers.
type Replicas struct {
	Desired int32 `json:"desired"`
	Ready   int32 `json:"ready"`
}

// Step is a command and its purpose.
type Step struct {
	Command string `json:"command"`
	Why     string `json:"why"`
}

// Profile is an AffinityProfile.
type Profile struct {
	Name string `json:"name"`
	// State and Message are the reason and the message of the condition Ready.
	State    string                    `json:"state"`
	Ready    bool                      `json:"ready"`
	Message  string                    `json:"message"`
	Progress *semmoev1.ProfileProgress `json:"progress,omitempty"`
	Result   *semmoev1.ProfileResult   `json:"result,omitempty"`
	// Drifted is true if the profile was made because of drift.
	Drifted bool `json:"madeForDrift,omitempty"`
}

// Plan is a PlacementPlan of a deployment.
type Plan struct {
	Name    string `json:"name"`
	Digest  string `json:"planDigest,omitempty"`
	Profile string `json:"profile"`
	State   string `json:"state"`
	Ready   bool   `json:"ready"`
	Message string `json:"message"`
	// Roles are the roles of the plan for the deployment: inService, candidate, wanted, pinned, takenBack,
	// outputChanged.
	Roles    []string               `json:"roles"`
	Verdict  semmoev1.Verdict       `json:"verdict,omitempty"`
	Tier     semmoev1.Tier          `json:"tier,omitempty"`
	Forecast *semmoev1.PlanForecast `json:"forecast,omitempty"`
	Drifted  bool                   `json:"madeForDrift,omitempty"`
}

// The roles of a plan for a deployment.
const (
	roleInService     = "inService"
	roleCandidate     = "candidate"
	roleWanted        = "wanted"
	rolePinned        = "pinned"
	roleTakenBack     = "takenBack"
	roleOutputChanged = "outputChanged"
)

// Revision is a workload of engine replicas, with its pods.
type Revision struct {
	Name     string `json:"revision"`
	Kind     string `json:"kind"`
	Workload string `json:"workload"`
	// Stage is inService, starting (desired by the spec, but not in service yet), canary, promoting, rollingBack, or
	// retired (being removed).
	Stage    string   `json:"stage"`
	Plan     string   `json:"planDigest,omitempty"`
	Replicas Replicas `json:"replicas"`
	Pods     []Pod    `json:"pods"`
}

const (
	stageInService   = "inService"
	stageStarting    = "starting"
	stageCanary      = "canary"
	stagePromoting   = "promoting"
	stageRollingBack = "rollingBack"
	stageRetired     = "retired"
)

// Pod is a pod of an engine or a request router.
type Pod struct {
	Name  string `json:"name"`
	Node  string `json:"node,omitempty"`
	Ready bool   `json:"ready"`
	// State is Ready, Starting, Deleting, the pod's phase, or the reason of a problem. Message describes the problem.
	State    string    `json:"state"`
	Message  string    `json:"message,omitempty"`
	Restarts int32     `json:"restarts,omitempty"`
	Since    time.Time `json:"since"`
	// Workers is the number of worker pods of a multi-pod replica. WorkersReady counts the ready ones.
	Workers      int `json:"workers,omitempty"`
	WorkersReady int `json:"workersReady,omitempty"`
}

// Routers describes the request routers of a deployment.
type Routers struct {
	Name     string   `json:"name"`
	Replicas Replicas `json:"replicas"`
	Pods     []Pod    `json:"pods"`
}

// Job is an inspection or a profiling Job.
type Job struct {
	Name string `json:"name"`
	// Component is inspect or profile. Profile is the AffinityProfile of a profiling Job.
	Component string `json:"component"`
	Profile   string `json:"profile,omitempty"`
	// State is Running, Suspended, Complete or Failed.
	State   string    `json:"state"`
	Message string    `json:"message,omitempty"`
	Since   time.Time `json:"since"`
}

// Describe returns the state of a deployment.
func Describe(o Objects) Deployment {
	moed := o.Deployment
	d := Deployment{
		Namespace: moed.Namespace, Name: moed.Name, Ready: condition(moed.Status.Conditions, semmoev1.ConditionReady),
		Paused: moed.Spec.Reconciliation == semmoev1.ReconciliationPaused, OwnedBy: gitops.OwnerOf(moed),
		Endpoint: moed.Status.Endpoint, Revision: moed.Status.Revision, Plan: moed.Status.PlanDigest,
		Replicas: Replicas{ptr.Deref(moed.Spec.Replicas, 1), moed.Status.ReadyReplicas},
		Locality: moed.Status.LAR, Drift: moed.Status.Drift, Rollout: moed.Status.Rollout,
		Profiles: o.profiles(), Plans: o.plans(), Revisions: o.revisions(), Routers: o.routers(), Jobs: o.jobs(),
		Conditions: moed.Status.Conditions, NotRead: o.NotRead, now: o.Now,
	}
	if model := moed.Status.Model; model != nil {
		d.Model = fmt.Sprintf("%s, %s of %s", model.Family, plural(model.MoELayers, "MoE layer"), plural(model.Experts, "expert"))
	}
	if ref := moed.Spec.Placement.PlanRef; ref != nil {
		d.Pinned = ref.Name
	}
	d.Next = nextSteps(moed)
	return d
}

// nextSteps returns the plugin commands that the operator waits for.
func nextSteps(moed *semmoev1.MoEDeployment) []Step {
	command := func(verb string) string {
		return fmt.Sprintf("kubectl semmoe %s %s -n %s", verb, moed.Name, moed.Namespace)
	}
	var steps []Step
	rolledOut := condition(moed.Status.Conditions, semmoev1.ConditionRolledOut)
	switch reason := rolledOut.Reason; {
	case slices.Contains([]string{"AwaitingApproval", "RolloutInterruptsService", "NoRouter"}, reason):
		steps = append(steps, Step{command("approve"), "to approve the rollout of the plan"})
	case reason == "CanaryInconclusive":
		steps = append(steps, Step{command("approve"), "to promote the plan after its soak time, although the canary comparison is inconclusive"})
	case reason == "RollbackPending":
		steps = append(steps, Step{command("rollback"), "to roll back the plan, which fails on its canary"})
	case strings.Contains(rolledOut.Message, ". AwaitingApproval: "):
		steps = append(steps, Step{command("approve"), "to approve the new tables"})
	}
	if moed.Spec.Reconciliation == semmoev1.ReconciliationPaused {
		steps = append(steps, Step{command("resume"), "to resume profiles, plans and rollouts"})
	}
	return steps
}

// belongs reports whether an object belongs to the deployment: it has the label that the operator sets, or an owner
// reference to the deployment, which users set.
func (o Objects) belongs(object metav1.Object) bool {
	owns := func(owner metav1.OwnerReference) bool { return owner.UID == o.Deployment.UID && owner.UID != "" }
	return object.GetLabels()[semmoev1.LabelDeployment] == o.Deployment.Name || slices.ContainsFunc(object.GetOwnerReferences(), owns)
}

func (o Objects) profiles() []Profile {
	named := []string{o.Deployment.Status.Profile}
	if profiling := o.Deployment.Spec.Profiling; profiling != nil && profiling.ProfileRef != nil {
		named = append(named, profiling.ProfileRef.Name)
	}
	profiles := []Profile{}
	newestFirst(o.Profiles)
	for _, profile := range o.Profiles {
		if !o.belongs(&profile) && !slices.Contains(named, profile.Name) {
			continue
		}
		ready := condition(profile.Status.Conditions, semmoev1.ConditionReady)
		profiles = append(profiles, Profile{
			Name: profile.Name, State: ready.Reason, Ready: ready.Status == metav1.ConditionTrue, Message: ready.Message,
			Progress: profile.Status.Progress, Result: profile.Status.Result, Drifted: profile.Labels[semmoev1.LabelBase] != "",
		})
	}
	return profiles
}

func (o Objects) plans() []Plan {
	plans := []Plan{}
	newestFirst(o.Plans)
	for _, plan := range o.Plans {
		roles := rolesOf(o.Deployment, &plan)
		if !o.belongs(&plan) && !slices.Contains(roles, rolePinned) && !slices.Contains(roles, roleWanted) {
			continue
		}
		ready := condition(plan.Status.Conditions, semmoev1.ConditionReady)
		plans = append(plans, Plan{
			Name: plan.Name, Digest: plan.Status.Plan, Profile: plan.Spec.ProfileRef.Name,
			State: ready.Reason, Ready: ready.Status == metav1.ConditionTrue, Message: ready.Message,
			Roles: roles, Verdict: plan.Status.Verdict, Tier: plan.Status.Tier, Forecast: plan.Status.Forecast,
			Drifted: plan.Labels[semmoev1.LabelBase] != "",
		})
	}
	return plans
}

// rolesOf returns the roles of a plan for a deployment.
func rolesOf(moed *semmoev1.MoEDeployment, plan *semmoev1.PlacementPlan) []string {
	roles, short := []string{}, plan.Status.Plan
	add := func(applies bool, role string) {
		if applies {
			roles = append(roles, role)
		}
	}
	inService := short != "" && short == moed.Status.PlanDigest
	candidate := moed.Status.Rollout != nil && short != "" && short == moed.Status.Rollout.CandidatePlan
	add(inService, roleInService)
	add(candidate, roleCandidate)
	add(plan.Name == moed.Status.Plan && !inService && !candidate, roleWanted)
	add(moed.Spec.Placement.PlanRef != nil && moed.Spec.Placement.PlanRef.Name == plan.Name, rolePinned)
	add(len(marksOf(plan, semmoev1.AnnotationFailed)) > 0, roleTakenBack)
	add(len(marksOf(plan, semmoev1.AnnotationOutputChanged)) > 0, roleOutputChanged)
	return roles
}

// marksOf returns the annotations of a plan with a key prefix, as sorted strings "revision: value".
func marksOf(plan *semmoev1.PlacementPlan, prefix string) []string {
	var marks []string
	for key, value := range plan.Annotations {
		if revision, ok := strings.CutPrefix(key, prefix); ok {
			marks = append(marks, revision+": "+value)
		}
	}
	slices.Sort(marks)
	return marks
}

func (o Objects) revisions() []Revision {
	revisions := []Revision{}
	newestFirst(o.StatefulSets)
	newestFirst(o.LeaderWorkerSets)
	for _, set := range o.StatefulSets {
		if o.belongs(&set) {
			owns := func(pod *corev1.Pod) bool { return metav1.IsControlledBy(pod, &set) }
			revisions = append(revisions, o.revision("StatefulSet", &set, &set.Spec.Template, set.Spec.Replicas, set.Status.ReadyReplicas, owns))
		}
	}
	for _, set := range o.LeaderWorkerSets {
		template := set.Spec.LeaderWorkerTemplate.LeaderTemplate
		if o.belongs(&set) && template != nil {
			owns := func(pod *corev1.Pod) bool { return pod.Labels[leaderworkersetv1.SetNameLabelKey] == set.Name }
			revisions = append(revisions, o.revision("LeaderWorkerSet", &set, template, set.Spec.Replicas, set.Status.ReadyReplicas, owns))
		}
	}
	return revisions
}

func (o Objects) revision(kind string, workload metav1.Object, template *corev1.PodTemplateSpec, replicas *int32, ready int32, owns func(*corev1.Pod) bool) Revision {
	digest := artifact.Digest(template.Annotations[semmoev1.AnnotationPlanDigest])
	r := Revision{
		Name: workload.GetLabels()[semmoev1.LabelRevision], Kind: kind, Workload: workload.GetName(), Plan: digest.Short(),
		Replicas: Replicas{Desired: ptr.Deref(replicas, 1)}, Pods: []Pod{},
	}
	r.Stage = o.stage(r.Name, workload)
	if len(o.Pods) == 0 {
		r.Replicas.Ready = ready // the user may not be allowed to list pods; the workload's status is slightly older
	}
	all := o.pods(nil)
	for _, pod := range all {
		if !owns(pod) || pod.Labels[semmoev1.LabelComponent] != semmoev1.ComponentEngine {
			continue
		}
		p := o.pod(pod)
		if size := replicagroup.Size(pod); size > 1 {
			p.Workers = size - 1
			for _, worker := range replicagroup.Workers(pod, all) {
				if podhealth.Ready(worker) {
					p.WorkersReady++
				}
			}
		}
		p.Ready = p.Ready && replicagroup.AllReady(pod, all)
		if p.Ready {
			r.Replicas.Ready++
		}
		r.Pods = append(r.Pods, p)
	}
	return r
}

// stage returns the stage of a revision's rollout.
func (o Objects) stage(revision string, workload metav1.Object) string {
	rollout := o.Deployment.Status.Rollout
	switch {
	case rollout != nil && rollout.CandidateRevision == revision && rollout.Phase == semmoev1.RolloutPhaseRollingBack:
		return stageRollingBack
	case workload.GetAnnotations()[semmoev1.AnnotationRollout] == semmoev1.RolloutPromoting:
		return stagePromoting
	case workload.GetAnnotations()[semmoev1.AnnotationRollout] != "":
		return stageCanary
	case revision == servingRevision(o.Deployment):
		return stageInService
	case revision == o.Deployment.Status.Revision:
		return stageStarting
	}
	return stageRetired
}

// servingRevision returns the revision that answers requests. Earlier releases of the operator report only the desired
// revision.
func servingRevision(moed *semmoev1.MoEDeployment) string {
	if moed.Status.Serving != nil {
		return moed.Status.Serving.Revision
	}
	return moed.Status.Revision
}

// pods returns the matching pods of the deployment, sorted by name. A nil matches selects all pods.
func (o Objects) pods(matches func(*corev1.Pod) bool) []*corev1.Pod {
	var pods []*corev1.Pod
	for i := range o.Pods {
		if pod := &o.Pods[i]; o.belongs(pod) && (matches == nil || matches(pod)) {
			pods = append(pods, pod)
		}
	}
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return pods
}

// pod describes one pod.
func (o Objects) pod(pod *corev1.Pod) Pod {
	p := Pod{Name: pod.Name, Node: pod.Spec.NodeName, Ready: podhealth.Ready(pod), State: string(pod.Status.Phase), Since: pod.CreationTimestamp.Time}
	for _, status := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		p.Restarts = max(p.Restarts, status.RestartCount)
	}
	problem, _ := podhealth.Find([]*corev1.Pod{pod}, nil, o.Now)
	switch {
	case pod.DeletionTimestamp != nil:
		p.State = "Deleting"
	case p.Ready:
		p.State = "Ready"
	case problem != nil:
		p.State, p.Message = problem.Reason, problem.Message
	case podhealth.Gate(pod) != "":
		p.State, p.Message = "Queued", "waits for its scheduling gate "+podhealth.Gate(pod)
	case pod.Status.Phase == corev1.PodRunning:
		p.State = "Starting"
	}
	return p
}

func (o Objects) routers() *Routers {
	for _, deployment := range o.Deployments {
		if !o.belongs(&deployment) || deployment.Labels[semmoev1.LabelComponent] != semmoev1.ComponentRouter {
			continue
		}
		r := &Routers{Name: deployment.Name, Replicas: Replicas{ptr.Deref(deployment.Spec.Replicas, 1), deployment.Status.ReadyReplicas}, Pods: []Pod{}}
		for _, pod := range o.pods(func(p *corev1.Pod) bool { return p.Labels[semmoev1.LabelComponent] == semmoev1.ComponentRouter }) {
			r.Pods = append(r.Pods, o.pod(pod))
		}
		return r
	}
	return nil
}

// jobs returns the Jobs of the deployment and of its profiles.
func (o Objects) jobs() []Job {
	jobs := []Job{}
	profiles := o.profiles()
	newestFirst(o.Jobs)
	for _, job := range o.Jobs {
		profile := job.Labels[semmoev1.LabelProfile]
		if !o.belongs(&job) && !slices.ContainsFunc(profiles, func(p Profile) bool { return p.Name == profile }) {
			continue
		}
		j := Job{Name: job.Name, Component: job.Labels[semmoev1.LabelComponent], Profile: profile, State: "Running", Since: job.CreationTimestamp.Time}
		if failed := jobstate.Finished(&job, batchv1.JobFailed); failed != nil {
			j.State, j.Message = "Failed", failed.Message
		} else if jobstate.Finished(&job, batchv1.JobComplete) != nil {
			j.State = "Complete"
		} else if ptr.Deref(job.Spec.Suspend, false) {
			j.State = "Suspended"
		}
		jobs = append(jobs, j)
	}
	return jobs
}
