// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"errors"
	"fmt"
	"slices"

	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"k8s.io/apimachinery/pkg/runtime"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/internal/observation/promquery"
)

// Add registers the webhooks with the webhook server of a manager. Every manager serves them, leader or not. hosts are
// the Prometheus servers that objects of all namespaces may use.
func Add(manager ctrl.Manager, hosts promquery.Hosts) error {
	reader := manager.GetClient()
	return errors.Join(
		serve(manager, &semmoev1.MoEDeployment{}, &moeDeployments{reader, hosts}),
		serve(manager, &semmoev1.AffinityProfile{}, &affinityProfiles{reader}),
		serve(manager, &semmoev1.PlacementPlan{}, &placementPlans{reader}),
		manager.AddReadyzCheck("webhook", manager.GetWebhookServer().StartedChecker()),
	)
}

func serve[T runtime.Object](manager ctrl.Manager, kind T, rules rules[T]) error {
	if err := ctrl.NewWebhookManagedBy(manager, kind).WithValidator(validator[T]{rules}).Complete(); err != nil {
		return fmt.Errorf("failed to set up the webhook of %T: %w", kind, err)
	}
	return nil
}

// rules are the validation rules of a kind.
type rules[T any] interface {
	// refuse returns the errors of an object, one for each fault, or nil. Each message names the field, the value, and
	// the allowed values.
	refuse(ctx context.Context, object T) []error
	// warn returns warnings for the author of an object.
	warn(ctx context.Context, object T) []string
	// warnDelete returns warnings for the deletion of an object.
	warnDelete(ctx context.Context, object T) []string
}

// replacer is implemented by rules that depend on the stored object.
type replacer[T any] interface {
	// replacing returns the object to validate when it replaces the stored object.
	replacing(stored, object T) T
}

// validator implements admission reviews with rules.
type validator[T any] struct{ rules rules[T] }

func (v validator[T]) ValidateCreate(ctx context.Context, object T) (admission.Warnings, error) {
	if faults := v.rules.refuse(ctx, object); len(faults) > 0 {
		return nil, faults[0]
	}
	return v.rules.warn(ctx, object), nil
}

// ValidateUpdate accepts errors that the stored object also has, and returns a warning for each. Clients such as
// autoscalers change other fields and cannot fix these errors, and the controllers report them. An update may fix one
// of several errors, but must not add one.
func (v validator[T]) ValidateUpdate(ctx context.Context, old, object T) (admission.Warnings, error) {
	if r, ok := v.rules.(replacer[T]); ok {
		old, object = r.replacing(old, old), r.replacing(old, object)
	}
	faults := v.rules.refuse(ctx, object)
	if len(faults) == 0 {
		return v.rules.warn(ctx, object), nil
	}
	stored := map[string]bool{}
	for _, fault := range v.rules.refuse(ctx, old) {
		stored[fault.Error()] = true
	}
	var warnings admission.Warnings
	for _, fault := range faults {
		if !stored[fault.Error()] {
			return nil, fault
		}
		if warning := "still invalid: " + fault.Error(); !slices.Contains(warnings, warning) { // two rules may return the same error
			warnings = append(warnings, warning)
		}
	}
	return append(warnings, v.rules.warn(ctx, object)...), nil
}

func (v validator[T]) ValidateDelete(ctx context.Context, object T) (admission.Warnings, error) {
	return v.rules.warnDelete(ctx, object), nil
}
