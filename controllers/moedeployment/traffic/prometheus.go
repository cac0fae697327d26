// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/controllers/moedeployment/desired"
	"github.com/semmoe/operator/controllers/moedeployment/locality"
	"github.com/semmoe/operator/internal/kube/printable"
	"github.com/semmoe/operator/internal/observation/promquery"
)

// maxCause is the maximum length, in bytes, of a failure cause in the log: it may contain text from the server.
const maxCause = 512

// tokenKey is the key of the bearer token in a Secret.
const tokenKey = "token"

// Prometheus queries the Prometheus servers that specs name.
type Prometheus struct {
	Client *promquery.Client
	// Secrets reads Secrets without the cache: RBAC allows the operator neither list nor watch of Secrets.
	Secrets client.Reader
	// Namespace is the operator's own namespace. It is empty if the operator runs outside the cluster.
	Namespace string
}

// Ask queries the values of the last two windows, but not from before the plan came into use.
func (s Prometheus) Ask(ctx context.Context, moed *semmoev1.MoEDeployment, since, now time.Time) locality.PrometheusEvidence {
	source := moed.Spec.Drift.Prometheus
	evidence := locality.PrometheusEvidence{Window: time.Duration(moed.Spec.Drift.WindowSeconds) * time.Second}
	step := evidence.Step()
	evidence.End = now.Truncate(step)
	token, problem := s.bearer(ctx, moed)
	if problem.Reason != "" {
		evidence.Problem = problem
		return evidence
	}
	points, err := s.Client.Range(ctx, promquery.Query{
		Address: source.Address, Namespace: moed.Namespace, Token: token, Expression: source.Query,
		Start: evidence.End.Add(step - 2*evidence.Window), End: evidence.End, Step: step,
	})
	if failure := (*promquery.Error)(nil); errors.As(err, &failure) {
		logr.FromContextOrDiscard(ctx).Info("Failed to read the local activation rate from Prometheus", "reason", failure.Reason, "cause", printable.Line(fmt.Sprint(failure.Cause), maxCause))
		evidence.Problem = desired.Finding{Reason: failure.Reason, Message: failure.Message}
		return evidence
	}
	evidence.Points = locality.Numbers(points, since)
	return evidence
}

// bearer reads the bearer token; empty if none is configured. The operator has no general permission to read Secrets:
// the user grants it for the named Secret.
func (s Prometheus) bearer(ctx context.Context, moed *semmoev1.MoEDeployment) (string, desired.Finding) {
	name := moed.Spec.Drift.Prometheus.AuthSecret
	if name == "" {
		return "", desired.Finding{}
	}
	secret := &corev1.Secret{}
	err := s.Secrets.Get(ctx, client.ObjectKey{Namespace: moed.Namespace, Name: name}, secret)
	field := fmt.Sprintf("spec.drift.prometheus.authSecret: Secret %q", name)
	switch {
	case apierrors.IsNotFound(err):
		return "", desired.Finding{Reason: "SecretNotFound", Message: field + " does not exist in this namespace: create it"}
	case apierrors.IsForbidden(err):
		return "", desired.Finding{Reason: "SecretForbidden", Message: fmt.Sprintf("%s may not be read by the operator. Allow it with: kubectl create role semmoe-drift -n %[2]s --verb=get --resource=secrets --resource-name=%[3]s; kubectl create rolebinding semmoe-drift -n %[2]s --role=semmoe-drift --serviceaccount=%[4]s:semmoe-manager",
			field, moed.Namespace, name, cmp.Or(s.Namespace, "semmoe-system"))}
	case err != nil:
		logr.FromContextOrDiscard(ctx).V(1).Info("Failed to read the token for Prometheus", "secret", name, "reason", err.Error())
		return "", desired.Finding{Reason: "SecretUnreadable", Message: field + " cannot be read now"}
	case len(secret.Data[tokenKey]) == 0:
		return "", desired.Finding{Reason: "SecretNotFound", Message: fmt.Sprintf("%s has no key %q, or an empty one", field, tokenKey)}
	}
	return string(secret.Data[tokenKey]), desired.Finding{}
}
