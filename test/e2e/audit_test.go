// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	leaderworkersetv1 "sigs.k8s.io/lws/api/leaderworkerset/v1"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/audit"
	"github.com/semmoe/operator/test/tier"
)

// installRights applies the operator's namespace, service accounts and roles from config. It returns an API server
// configuration with the manager's rights, which the managers of this process use too.
func installRights(ctx context.Context) (*rest.Config, error) {
	for _, file := range slices.Concat([]string{"manager/namespace.yaml"}, rightsFiles) {
		if err := applyAll(ctx, filepath.Join(repository, "config", file)); err != nil {
			return nil, err
		}
	}
	manager := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: storeNamespace, Name: managerName}}
	token, err := newToken(ctx, manager)
	if err != nil {
		return nil, err
	}
	config := rest.AnonymousClientConfig(restConfig)
	config.BearerToken = token
	return config, nil
}

// rightsFiles lists the files of config that contain roles and bindings.
var rightsFiles = []string{"rbac/role.yaml", "rbac/manager.yaml", "rbac/router.yaml", "rbac/users.yaml", "store/rbac.yaml", "webhook/rbac.yaml"}

// userRoles lists the roles that are intended for users, not for the operator.
var userRoles = []string{"ClusterRole semmoe-editor", "ClusterRole semmoe-metrics-reader", "ClusterRole semmoe-viewer"}

// optionalRights lists the rights that a run of the suite may leave unused, each with its purpose.
var optionalRights = map[string]string{
	"ClusterRole semmoe-manager: delete configmaps":                             "a damaged ConfigMap of a plan is recreated",
	"ClusterRole semmoe-manager: delete affinityprofiles.semmoe.io":             "re-planning deletes profiles that newer ones have replaced",
	"ClusterRole semmoe-manager: get affinityprofiles.semmoe.io":                "a plan's profile that is not in the cache yet is read from the API server",
	"ClusterRole semmoe-manager: get placementplans.semmoe.io":                  "a pinned plan that is not in the cache yet is read from the API server",
	"ClusterRole semmoe-manager: get statefulsets.apps":                         "the StatefulSet of a LeaderWorkerSet's workers reports why they cannot be created",
	"ClusterRole semmoe-manager: patch events.events.k8s.io":                    "a repeated event increases the count of the first one",
	"Role semmoe-system/semmoe-store-authority: create configmaps":              "the first store publishes its authority, or the ConfigMap was deleted",
	"Role semmoe-system/semmoe-router-client: update secrets semmoe-manager-ca": "the certificate authority is renewed in the last third of its ten years",
	"ClusterRole semmoe-router: list pods":                                      "an API server without streaming lists requires a list request",
}

// checkLog compares the requests of the operator's pods and of the managers of this process with the rights that config
// grants. No request may have been refused. When all stories have run, they must have used every granted right. All containers that the
// operator creates must satisfy the restricted pod security standard, except the engine's container: the user controls
// its security context.
func checkLog() error {
	files, err := cluster.AuditLogs()
	if err != nil {
		return err
	}
	log := audit.NewLog()
	if err := log.ReadFiles(files...); err != nil {
		return fmt.Errorf("failed to check the audit log: %w", err)
	}
	for name, why := range log.InsecureContainers(semmoev1.EngineContainer) {
		if name != semmoev1.EngineContainer {
			return fmt.Errorf("container %s violates the restricted pod security standard: %s", name, why)
		}
	}
	grants, err := installedGrants()
	if err != nil {
		return err
	}
	refused, err := log.Refused(grants)
	if err != nil {
		return err
	}
	if len(refused) > 0 {
		return fmt.Errorf("the API server refused %d requests because config does not grant the rights:\n%s", len(refused), strings.Join(refused, "\n"))
	}
	unused, total, err := log.Unused(grants)
	if err != nil {
		return err
	}
	fmt.Printf("the operator sent %d different requests, none was refused; of the %d rights in config %d were not used:\n%s\n",
		log.Requests(), total, len(unused), strings.Join(unused, "\n"))
	needless := slices.DeleteFunc(unused, func(right string) bool { return optionalRights[right] != "" })
	if whole := tier.IsNightly() && flag.Lookup("test.run").Value.String() == ""; whole && len(needless) > 0 {
		return fmt.Errorf("%d rights in config are not used by any story:\n%s", len(needless), strings.Join(needless, "\n"))
	}
	return nil
}

// installedGrants returns the rights that config grants to service accounts, without kinds that no test installed.
func installedGrants() ([]audit.Grant, error) {
	var clusterRoles []rbacv1.ClusterRole
	var roles []rbacv1.Role
	var clusterBindings []rbacv1.ClusterRoleBinding
	var bindings []rbacv1.RoleBinding
	for _, file := range rightsFiles {
		all, err := readAll(filepath.Join(repository, "config", file))
		if err != nil {
			return nil, err
		}
		for _, u := range all {
			switch u.GetKind() {
			case "ClusterRole":
				clusterRoles, err = appendAs(clusterRoles, u)
			case "Role":
				roles, err = appendAs(roles, u)
			case "ClusterRoleBinding":
				clusterBindings, err = appendAs(clusterBindings, u)
			case "RoleBinding":
				bindings, err = appendAs(bindings, u)
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
		}
	}
	grants, unbound, err := audit.Installed(clusterRoles, roles, clusterBindings, bindings)
	if err != nil {
		return nil, err
	}
	// The manager creates the bindings of the request routers' role.
	const router = "ClusterRole semmoe-router"
	if want := slices.Sorted(slices.Values(append([]string{router}, userRoles...))); !slices.Equal(unbound, want) {
		return nil, fmt.Errorf("config has no binding for the roles %v, want %v", unbound, want)
	}
	for _, role := range clusterRoles {
		if "ClusterRole "+role.Name == router {
			grants = append(grants, audit.Grant{Role: router, Rules: role.Rules, User: audit.ServiceAccount("*", "*-router")})
		}
	}
	if _, err := os.Stat(groupsBinary()); err != nil || !tier.IsNightly() {
		for i := range grants {
			grants[i].Rules = slices.DeleteFunc(slices.Clone(grants[i].Rules), func(rule rbacv1.PolicyRule) bool {
				return slices.Equal(rule.APIGroups, []string{leaderworkersetv1.GroupVersion.Group})
			})
		}
	}
	return grants, nil
}

// appendAs converts an object to its type and appends it. A field that the type does not have is an error.
func appendAs[T any](all []T, u *unstructured.Unstructured) ([]T, error) {
	var object T
	err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(u.Object, &object, true)
	return append(all, object), err
}

// readAll reads the objects of a file.
func readAll(file string) ([]*unstructured.Unstructured, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var all []*unstructured.Unstructured
	documents := utilyaml.NewYAMLOrJSONDecoder(bytes.NewReader(data), 4096)
	for {
		u := &unstructured.Unstructured{}
		if err := documents.Decode(&u.Object); errors.Is(err, io.EOF) {
			return all, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if len(u.Object) > 0 {
			all = append(all, u)
		}
	}
}

// applyAll applies the objects of a file.
func applyAll(ctx context.Context, file string) error {
	all, err := readAll(file)
	if err != nil {
		return err
	}
	for _, u := range all {
		// The suite runs under the user ranges of OpenShift, where the cluster sets the group of volumes.
		unstructured.RemoveNestedField(u.Object, "spec", "template", "spec", "securityContext", "fsGroup")
		if err := api.Apply(ctx, client.ApplyConfigurationFromUnstructured(u), client.FieldOwner("e2e"), client.ForceOwnership); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return nil
}
