// SPDX-License-Identifier: Apache-2.0

package gitops

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
)

const (
	// actionsKey is the key of the actions of a MoEDeployment in argocd-cm.
	actionsKey = "resource.customizations.actions.semmoe.io_MoEDeployment"
	// fieldManager is the field manager of the server of Argo CD, which runs actions.
	fieldManager = "argocd-server"
)

// Actions contains the scripts of the actions of a MoEDeployment, as in argocd-cm.
type Actions struct {
	Discovery   string       `json:"discovery.lua"`
	Definitions []Definition `json:"definitions"`
}

// Definition is the script of one action.
type Definition struct {
	Name   string `json:"name"`
	Script string `json:"action.lua"`
}

// ParseActions reads the actions of a MoEDeployment from the data of the ConfigMap argocd-cm.
func ParseActions(data map[string]string) (*Actions, error) {
	actions := &Actions{}
	if err := yaml.UnmarshalStrict([]byte(data[actionsKey]), actions); err != nil {
		return nil, fmt.Errorf("failed to parse %s: %w", actionsKey, err)
	}
	return actions, nil
}

// Enabled runs the discovery of actions on an object. The result has the names of all actions; the value is true for an
// enabled action. Each action must have a display name, and must state whether it is disabled.
func (a *Actions) Enabled(ctx context.Context, object *unstructured.Unstructured) (map[string]bool, error) {
	table, err := run(ctx, a.Discovery, object.Object)
	if err != nil {
		return nil, fmt.Errorf("failed to discover the actions: %w", err)
	}
	found, _ := goValue(table, map[string]any{}).(map[string]any)
	enabled := map[string]bool{}
	for name, value := range found {
		action, _ := value.(map[string]any)
		disabled, isSet := action["disabled"].(bool)
		if title, _ := action["displayName"].(string); title == "" || !isSet {
			return nil, fmt.Errorf("action %s is %v: a displayName and disabled are required", name, action)
		}
		enabled[name] = !disabled
	}
	return enabled, nil
}

// Run runs an action on a MoEDeployment in a cluster like Argo CD: the action must be enabled, its script changes a copy
// of the live object, and a merge patch applies the difference.
func (a *Actions) Run(ctx context.Context, api client.Client, key client.ObjectKey, name string) error {
	live := &unstructured.Unstructured{}
	live.SetGroupVersionKind(semmoev1.GroupVersion.WithKind("MoEDeployment"))
	if err := api.Get(ctx, key, live); err != nil {
		return err
	}
	enabled, err := a.Enabled(ctx, live)
	if err != nil {
		return err
	}
	if !enabled[name] {
		return fmt.Errorf("action %s is not enabled: %v", name, enabled)
	}
	for _, definition := range a.Definitions {
		if definition.Name != name {
			continue
		}
		changed, err := Act(ctx, definition.Script, live)
		if err != nil {
			return fmt.Errorf("failed to run action %s: %w", name, err)
		}
		return api.Patch(ctx, changed, client.MergeFrom(live), client.FieldOwner(fieldManager))
	}
	return fmt.Errorf("action %s has no script", name)
}
