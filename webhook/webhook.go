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
	"github.com/semmoe/operator/internal/promquery"
)

// Add serves the webhooks from a manager's webhook server, on every manager, leader or not. hosts are the Prometheus servers that objects of
// every namespace may name.
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
		return fmt.Errorf("set up the webhook of %T: %w", kind, err)
	}
	return nil
}

// rules are what is said of the objects of a kind.
type rules[T any] interface {
	// refuse returns why the object must not be, a reason per fault; nil where it may. Messages name the field, the value, and what is allowed.
	refuse(ctx context.Context, object T) []error
	// warn is what its author should know.
	warn(ctx context.Context, object T) []string
	// warnDelete is what whoever deletes it should know.
	warnDelete(ctx context.Context, object T) []string
}

// replacer are rules that depend on the stored object.
type replacer[T any] interface {
	// replacing returns an object as it is to be judged where it replaces the stored one.
	replacing(stored, object T) T
}

// validator turns rules into admission reviews.
type validator[T any] struct{ rules rules[T] }

func (v validator[T]) ValidateCreate(ctx context.Context, object T) (admission.Warnings, error) {
	if faults := v.rules.refuse(ctx, object); len(faults) > 0 {
		return nil, faults[0]
	}
	return v.rules.warn(ctx, object), nil
}

// ValidateUpdate accepts faults that the stored object has as well, and warns of each: an autoscaler, say, changes something else and cannot fix
// them, and the controllers have reported them already. An update that fixes one of several faults is accepted, one that adds a fault is not.
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
		if warning := "still invalid: " + fault.Error(); !slices.Contains(warnings, warning) { // two rules may find the same
			warnings = append(warnings, warning)
		}
	}
	return append(warnings, v.rules.warn(ctx, object)...), nil
}

func (v validator[T]) ValidateDelete(ctx context.Context, object T) (admission.Warnings, error) {
	return v.rules.warnDelete(ctx, object), nil
}
