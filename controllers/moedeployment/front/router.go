// SPDX-License-Identifier: Apache-2.0

package front

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	appsac "k8s.io/client-go/applyconfigurations/apps/v1"
	coreac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	policyac "k8s.io/client-go/applyconfigurations/policy/v1"
	rbacac "k8s.io/client-go/applyconfigurations/rbac/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/childobjects"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/internal/artifact"
	"github.com/semmoe/operator/internal/artifact/access"
	"github.com/semmoe/operator/internal/engine/registry"
	"github.com/semmoe/operator/internal/router/livesamples"
	"github.com/semmoe/operator/internal/router/managerauth"
)

// routerClusterRole contains the permissions of a request router. It is bound in the router's namespace.
const routerClusterRole = "semmoe-router"

// exitSeconds is the maximum time for a request router to exit after it has drained or stopped draining.
const exitSeconds = 10

// tablesMountPath is the mount path of the ConfigMap that selects the tables for a request router.
const tablesMountPath = "/etc/semmoe/tables"

// reconcileRouter writes the request router, and reports whether an up-to-date router pod serves.
func (f *Front) reconcileRouter(ctx context.Context, moed *semmoev1.MoEDeployment) (serves bool, err error) {
	account := &corev1.ServiceAccount{}
	accountIntent := routerServiceAccount(moed)
	if err := childobjects.EnsureLatest(ctx, f.Client, f.Live, moed, account, accountIntent, coreac.ExtractServiceAccount); err != nil {
		return false, fmt.Errorf("failed to reconcile the ServiceAccount of the request router: %w", err)
	}
	accountUID := account.UID
	if accountIntent.UID != nil { // just written: the response is newer than the cache
		accountUID = *accountIntent.UID
	}
	if accountUID == "" {
		return false, nil // the spec has changed, and an update event follows
	}
	if err := childobjects.EnsureLatest(ctx, f.Client, f.Live, moed, &rbacv1.RoleBinding{}, routerRoleBinding(moed), rbacac.ExtractRoleBinding); err != nil {
		return false, fmt.Errorf("failed to reconcile the RoleBinding of the request router: %w", err)
	}
	authority, err := f.StoreAuthority(ctx, moed)
	if err != nil {
		return false, err
	}
	intent := routerDeployment(moed, f.Image, accountUID, f.ManagerAuthority)
	if f.PullPolicy != "" {
		intent.Spec.Template.Spec.Containers[0].WithImagePullPolicy(f.PullPolicy)
	}
	if authority != "" {
		giveStore(intent, f.Store, authority)
	}
	if err := mergeTemplate(intent.Spec.Template, moed); err != nil {
		return false, err
	}
	deployment := &appsv1.Deployment{}
	if err := childobjects.EnsureLatest(ctx, f.Client, f.Live, moed, deployment, intent, appsac.ExtractDeployment); err != nil {
		return false, fmt.Errorf("failed to reconcile the Deployment of the request router: %w", err)
	}
	if err := childobjects.EnsureLatest(ctx, f.Client, f.Live, moed, &policyv1.PodDisruptionBudget{}, routerBudget(moed), policyac.ExtractPodDisruptionBudget); err != nil {
		return false, fmt.Errorf("failed to reconcile the PodDisruptionBudget of the request router: %w", err)
	}
	return intent.UID == nil && updatedAvailable(deployment), nil // the cache does not contain an object that was just written
}

// updatedAvailable reports whether at least one pod of the current template is available: there are more available pods
// than outdated pods.
func updatedAvailable(deployment *appsv1.Deployment) bool {
	status := deployment.Status
	return status.ObservedGeneration == deployment.Generation && status.AvailableReplicas > status.Replicas-status.UpdatedReplicas
}

// StoreAuthority returns the certificate authority of the artifact store if routers need the store to read plans.
// Without a store, or before the store has published its authority, the result is empty: routers then serve without
// plans. While the published authority is missing, it returns the value that routers already have: the store publishes
// it again, and until then routers must not restart and lose their plans.
func (f *Front) StoreAuthority(ctx context.Context, moed *semmoev1.MoEDeployment) (string, error) {
	if !desired.UsesPlans(moed) {
		return "", nil
	}
	authority, err := f.Store.Authority(ctx)
	switch {
	case errors.Is(err, access.ErrNoStore):
		return "", nil
	case apierrors.IsNotFound(err):
		return f.givenAuthority(ctx, moed)
	}
	return authority, err
}

// givenAuthority returns the certificate authority of the artifact store in the router's Deployment, or "".
func (f *Front) givenAuthority(ctx context.Context, moed *semmoev1.MoEDeployment) (string, error) {
	var deployment appsv1.Deployment
	err := f.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: desired.RouterName(moed)}, &deployment)
	if err != nil {
		return "", client.IgnoreNotFound(err)
	}
	for _, container := range deployment.Spec.Template.Spec.Containers {
		for _, env := range container.Env {
			if env.Name == artifact.CAVariable {
				return env.Value, nil
			}
		}
	}
	return "", nil
}

// giveStore configures access to the artifact store in the router's pods.
func giveStore(deployment *appsac.DeploymentApplyConfiguration, store *access.Access, authority string) {
	spec := deployment.Spec.Template.Spec
	container := &spec.Containers[0]
	for _, env := range store.Env(authority) {
		container.WithEnv(coreac.EnvVar().WithName(env.Name).WithValue(env.Value))
	}
	mount := artifact.TokenMount()
	container.WithVolumeMounts(coreac.VolumeMount().WithName(mount.Name).WithMountPath(mount.MountPath).WithReadOnly(mount.ReadOnly))
	token := artifact.TokenVolume()
	source := token.Projected.Sources[0].ServiceAccountToken
	spec.WithVolumes(coreac.Volume().WithName(token.Name).WithProjected(coreac.ProjectedVolumeSource().WithSources(
		coreac.VolumeProjection().WithServiceAccountToken(coreac.ServiceAccountTokenProjection().
			WithAudience(source.Audience).WithExpirationSeconds(*source.ExpirationSeconds).WithPath(source.Path)))))
}

// deleteRouter deletes the request router if the mode does not need one.
func (f *Front) deleteRouter(ctx context.Context, moed *semmoev1.MoEDeployment) error {
	for _, object := range []client.Object{&appsv1.Deployment{}, &policyv1.PodDisruptionBudget{}, &rbacv1.RoleBinding{}, &corev1.ServiceAccount{}} {
		err := f.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: desired.RouterName(moed)}, object)
		if err == nil && metav1.IsControlledBy(object, moed) && object.GetDeletionTimestamp() == nil {
			err = f.remove(ctx, moed, object)
		}
		if client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("failed to delete the request router: %w", err)
		}
	}
	return nil
}

func routerBudget(moed *semmoev1.MoEDeployment) *policyac.PodDisruptionBudgetApplyConfiguration {
	return policyac.PodDisruptionBudget(desired.RouterName(moed), moed.Namespace).
		WithLabels(desired.Labels(moed, semmoev1.ComponentRouter)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(policyac.PodDisruptionBudgetSpec().
			WithUnhealthyPodEvictionPolicy(policyv1.AlwaysAllow). // a pod that does not serve must not block the drain of its node
			WithMaxUnavailable(intstr.FromInt32(1)).
			WithSelector(metav1ac.LabelSelector().WithMatchLabels(desired.Selector(moed, semmoev1.ComponentRouter))))
}

func routerServiceAccount(moed *semmoev1.MoEDeployment) *coreac.ServiceAccountApplyConfiguration {
	return coreac.ServiceAccount(desired.RouterName(moed), moed.Namespace).
		WithLabels(desired.Labels(moed, semmoev1.ComponentRouter)).
		WithOwnerReferences(desired.OwnerReference(moed))
}

func routerRoleBinding(moed *semmoev1.MoEDeployment) *rbacac.RoleBindingApplyConfiguration {
	return rbacac.RoleBinding(desired.RouterName(moed), moed.Namespace).
		WithLabels(desired.Labels(moed, semmoev1.ComponentRouter)).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithRoleRef(rbacac.RoleRef().WithAPIGroup(rbacv1.GroupName).WithKind("ClusterRole").WithName(routerClusterRole)).
		WithSubjects(rbacac.Subject().WithKind(rbacv1.ServiceAccountKind).WithNamespace(moed.Namespace).WithName(desired.RouterName(moed)))
}

// replicaSelectorText returns replicaSelector in the form of the router's flag.
func replicaSelectorText(moed *semmoev1.MoEDeployment) string {
	return fmt.Sprintf("%s=%s,%s in (%s,%s)", semmoev1.LabelDeployment, moed.Name, semmoev1.LabelComponent, semmoev1.ComponentEngine, semmoev1.ComponentWorker)
}

// routerArgs returns the arguments of the request router. Options that the spec leaves open are omitted, so that the
// router's defaults apply.
func routerArgs(moed *semmoev1.MoEDeployment) []string {
	args := []string{
		"router",
		"--namespace=" + moed.Namespace,
		"--selector=" + replicaSelectorText(moed),
		"--engine=" + string(moed.Spec.Engine.Type),
		"--sample-percent=" + strconv.Itoa(int(desired.SamplePercent(moed))),
		"--host=$(" + desired.PodIPVariable + ")",
		fmt.Sprintf("--drain-timeout=%ds", desired.GraceSeconds),
	}
	if profiling := moed.Spec.Profiling; profiling != nil && profiling.LiveSamples == semmoev1.LiveSamplesSequences {
		args = append(args, "--live-samples="+string(livesamples.Sequences))
	}
	if desired.UsesPlans(moed) {
		args = append(args, "--tables-file="+tablesMountPath+"/"+semmoev1.TablesKey)
	}
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeEndpointPicker {
		args = append(args, "--endpoint-picker")
	}
	if weights := moed.Spec.Routing.Weights; weights != nil {
		args = append(args, "--weights="+weightsText(*weights))
	}
	if limit := moed.Spec.Routing.PendingLimitPerRank; limit != nil {
		args = append(args, "--pending-limit-per-rank="+strconv.Itoa(int(*limit)))
	}
	if events := moed.Spec.Routing.KVEvents; events != nil {
		args = append(args, "--kv-events-port="+strconv.Itoa(int(events.Port)))
	}
	args = append(args, resilienceArgs(moed.Spec.Routing)...)
	if hold := moed.Spec.Routing.HoldMilliseconds; hold != nil {
		args = append(args, fmt.Sprintf("--hold=%dms", *hold))
	}
	// A path that a newer release rejects must not stop the router.
	if paths := slices.DeleteFunc(slices.Clone(moed.Spec.Routing.PassThrough), func(path string) bool { return registry.CheckPassThrough(path) != nil }); len(paths) > 0 {
		args = append(args, "--pass-through="+strings.Join(paths, ","))
	}
	args = append(args, securityArgs(moed)...)
	args = append(args, telemetryArgs(moed.Spec.Routing)...)
	if limit := moed.Spec.Placement.TokenLoadLimitPercent; limit != nil {
		args = append(args, "--cap="+percentText(*limit))
	}
	return args
}

// percentText formats a percentage as a factor.
func percentText(percent int32) string {
	return strconv.FormatFloat(float64(percent)/100, 'f', -1, 64)
}

// weightsText formats the weights for the router, where 1 is 100 percent.
func weightsText(weights semmoev1.RoutingWeights) string {
	weight := func(percent *int32) string { return percentText(ptr.Deref(percent, 100)) }
	return fmt.Sprintf("affinity=%s,prefix=%s,load=%s,wait=%s",
		weight(weights.AffinityPercent), weight(weights.PrefixPercent), weight(weights.LoadPercent), weight(weights.WaitPercent))
}

// routerPorts returns the ports of the request router: for clients or a Gateway, for monitoring, and for managers.
func routerPorts(moed *semmoev1.MoEDeployment) []*coreac.ContainerPortApplyConfiguration {
	port := func(name string, number int32) *coreac.ContainerPortApplyConfiguration {
		return coreac.ContainerPort().WithName(name).WithContainerPort(number).WithProtocol(corev1.ProtocolTCP)
	}
	metrics, private := port("metrics", desired.RouterMetricsPort), port("private", managerauth.Port)
	if moed.Spec.Routing.Mode == semmoev1.RoutingModeEndpointPicker {
		return []*coreac.ContainerPortApplyConfiguration{port("ext-proc", semmoev1.PickerPort), port("health", semmoev1.PickerHealthPort), metrics, private}
	}
	return []*coreac.ContainerPortApplyConfiguration{port("http", semmoev1.ServicePort), metrics, private}
}

// mergeTemplate merges spec.routing.template over the pod template of the request router. User-provided lists replace
// those of the operator; maps are merged. A topology spread constraint without a selector counts the router pods of its
// own revision.
func mergeTemplate(template *coreac.PodTemplateSpecApplyConfiguration, moed *semmoev1.MoEDeployment) error {
	users := moed.Spec.Routing.Template
	if users == nil {
		return nil
	}
	spec := users.Spec.DeepCopy()
	if len(spec.TopologySpreadConstraints) > 0 {
		template.Spec.TopologySpreadConstraints = nil
	}
	for i := range spec.TopologySpreadConstraints {
		if constraint := &spec.TopologySpreadConstraints[i]; constraint.LabelSelector == nil {
			constraint.LabelSelector = &metav1.LabelSelector{MatchLabels: desired.Selector(moed, semmoev1.ComponentRouter)}
			if constraint.MatchLabelKeys == nil {
				constraint.MatchLabelKeys = []string{appsv1.DefaultDeploymentUniqueLabelKey}
			}
		}
	}
	container := &template.Spec.Containers[0]
	var failed error
	for _, users := range spec.Containers { // the schema allows only the router's container
		failed = errors.Join(failed, mergeFields(users.Resources, container.Resources))
	}
	spec.Containers = nil
	if failed = errors.Join(failed, mergeFields(spec, template.Spec), mergeFields(users.Metadata, template.ObjectMetaApplyConfiguration)); failed != nil {
		return fmt.Errorf("failed to merge spec.routing.template: %w", failed)
	}
	return nil
}

// mergeFields sets the fields of ours that users sets. It merges maps, and replaces lists that are empty in ours.
func mergeFields(users, ours any) error {
	data, err := json.Marshal(users)
	if err != nil {
		return err
	}
	return json.Unmarshal(data, ours)
}

// routerDeployment returns the Deployment of the request router. Its pods carry the UID of their ServiceAccount: tokens
// of a deleted account are void even if a new account has the same name, and pods with such a token receive no more
// endpoint changes. managers is the certificate authority with which routers verify managers.
func routerDeployment(moed *semmoev1.MoEDeployment, image string, account types.UID, managers string) *appsac.DeploymentApplyConfiguration {
	podLabels := desired.Labels(moed, semmoev1.ComponentRouter)
	probe := func(path string) *coreac.ProbeApplyConfiguration {
		return coreac.Probe().WithPeriodSeconds(2).WithTimeoutSeconds(2).WithFailureThreshold(3).
			WithHTTPGet(coreac.HTTPGetAction().WithPath(path).WithPort(intstr.FromString("metrics")))
	}
	container := coreac.Container().
		WithName("router").
		WithImage(image).
		WithArgs(routerArgs(moed)...).
		WithEnv(coreac.EnvVar().WithName(desired.PodIPVariable).WithValueFrom(coreac.EnvVarSource().
			WithFieldRef(coreac.ObjectFieldSelector().WithAPIVersion("v1").WithFieldPath("status.podIP"))),
			// Close to the memory limit, the garbage collector should work harder before the kernel kills the process.
			// The divisor is explicit: with a default from the API server, the comparison would see a missing field at
			// every reconciliation.
			coreac.EnvVar().WithName("GOMEMLIMIT").WithValueFrom(coreac.EnvVarSource().
				WithResourceFieldRef(coreac.ResourceFieldSelector().WithResource("limits.memory").WithDivisor(resource.MustParse("1")))),
			coreac.EnvVar().WithName(managerauth.AuthorityVariable).WithValue(managers)).
		WithPorts(routerPorts(moed)...).
		WithReadinessProbe(probe("/readyz")).
		WithLivenessProbe(probe("/healthz").WithPeriodSeconds(10)).
		WithLifecycle(coreac.Lifecycle().WithPreStop(coreac.LifecycleHandler().WithSleep(coreac.SleepAction().WithSeconds(desired.DrainSeconds)))).
		WithResources(coreac.ResourceRequirements().
			WithRequests(corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("256Mi")}).
			WithLimits(corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")})).
		WithSecurityContext(coreac.SecurityContext().
			WithAllowPrivilegeEscalation(false).
			WithReadOnlyRootFilesystem(true).
			WithCapabilities(coreac.Capabilities().WithDrop("ALL"))).
		WithTerminationMessagePolicy(corev1.TerminationMessageFallbackToLogsOnError).
		WithVolumeMounts(coreac.VolumeMount().WithName("snapshot").WithMountPath("/var/lib/semmoe"))
	setExportVariables(moed.Spec.Routing, container)
	if desired.UsesPlans(moed) {
		container.WithVolumeMounts(coreac.VolumeMount().WithName("tables").WithMountPath(tablesMountPath).WithReadOnly(true))
	}
	spec := coreac.PodSpec().
		WithServiceAccountName(desired.RouterName(moed)).
		WithEnableServiceLinks(false).
		WithTerminationGracePeriodSeconds(desired.DrainSeconds + desired.GraceSeconds + exitSeconds).
		WithSecurityContext(coreac.PodSecurityContext().
			WithRunAsNonRoot(true).
			WithSeccompProfile(coreac.SeccompProfile().WithType(corev1.SeccompProfileTypeRuntimeDefault))).
		WithTopologySpreadConstraints(coreac.TopologySpreadConstraint().
			WithMaxSkew(1).WithTopologyKey(corev1.LabelHostname).WithWhenUnsatisfiable(corev1.ScheduleAnyway).
			WithLabelSelector(metav1ac.LabelSelector().WithMatchLabels(desired.Selector(moed, semmoev1.ComponentRouter))).
			// Pods of the previous revision must not count: after a rolling update all new pods could be on one node.
			WithMatchLabelKeys(appsv1.DefaultDeploymentUniqueLabelKey)).
		WithContainers(container).
		WithVolumes(coreac.Volume().WithName("snapshot").WithEmptyDir(coreac.EmptyDirVolumeSource()))
	if desired.UsesPlans(moed) {
		// The ConfigMap is optional: it does not exist before tables are swapped for the first time.
		spec.WithVolumes(coreac.Volume().WithName("tables").WithConfigMap(
			coreac.ConfigMapVolumeSource().WithName(desired.TablesName(moed)).WithOptional(true)))
	}
	mountSecrets(moed, spec)
	if template := moed.Spec.Template; template != nil {
		for _, secret := range template.Spec.ImagePullSecrets {
			spec.WithImagePullSecrets(coreac.LocalObjectReference().WithName(secret.Name))
		}
	}
	return appsac.Deployment(desired.RouterName(moed), moed.Namespace).
		WithLabels(podLabels).
		WithOwnerReferences(desired.OwnerReference(moed)).
		WithSpec(appsac.DeploymentSpec().
			WithReplicas(moed.Spec.Routing.Replicas).
			WithSelector(metav1ac.LabelSelector().WithMatchLabels(desired.Selector(moed, semmoev1.ComponentRouter))).
			WithStrategy(appsac.DeploymentStrategy().
				WithType(appsv1.RollingUpdateDeploymentStrategyType).
				WithRollingUpdate(appsac.RollingUpdateDeployment().WithMaxUnavailable(intstr.FromInt32(0)).WithMaxSurge(intstr.FromInt32(1)))).
			WithTemplate(coreac.PodTemplateSpec().
				WithLabels(podLabels).
				WithAnnotations(map[string]string{semmoev1.AnnotationServiceAccount: string(account)}).
				WithSpec(spec)))
}
