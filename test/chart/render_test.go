// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"encoding/json"
	"flag"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	"github.com/semmoe/operator/test/programs"
	"github.com/semmoe/operator/test/tier"
)

var update = flag.Bool("update", false, "write the golden files anew")

// valueSets returns the values in testdata by file name. "default" are the default values of the chart.
func valueSets(t *testing.T) map[string]string {
	t.Helper()
	sets := map[string]string{"default": "{}"}
	files, err := filepath.Glob(filepath.Join("testdata", "*.values.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatalf("testdata has %d value sets (error %v)", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		sets[strings.TrimSuffix(filepath.Base(file), ".values.yaml")] = string(text)
	}
	return sets
}

func TestLint(t *testing.T) {
	for name, values := range valueSets(t) {
		t.Run(name, func(t *testing.T) {
			output, err := helm(t, nil, values, "lint", directory, "--strict", "--namespace", namespace)
			if err != nil || strings.Contains(output, "[INFO]") || !strings.Contains(output, "0 chart(s) failed") {
				t.Errorf("%v\n%s", err, output)
			}
		})
	}
}

// TestGolden compares the rendered value sets with golden files, which reviewers read. The default values are compared
// with config/ instead. The RBAC rules of the manager are generated, and left out.
func TestGolden(t *testing.T) {
	sets := valueSets(t)
	delete(sets, "default")
	for name, values := range sets {
		t.Run(name, func(t *testing.T) {
			manifest, err := template(t, values)
			if err != nil {
				t.Fatal(err)
			}
			got := withoutTemplate(manifest, "rbac/role.yaml")
			golden := filepath.Join("testdata", name+".golden.yaml")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s differs (-want +got); go test ./test/chart -run TestGolden -args -update accepts it:\n%s", golden, diff)
			}
		})
	}
}

// withoutTemplate returns a manifest without the documents of a template.
func withoutTemplate(manifest, name string) string {
	const separator = "---\n"
	var left []string
	for _, document := range strings.Split(manifest, separator) {
		if !strings.HasPrefix(document, "# Source: semmoe-operator/templates/"+name+"\n") {
			left = append(left, document)
		}
	}
	return strings.Join(left, separator)
}

// TestNothingIsRenderedTwice checks that Helm creates no object twice, for any watched namespaces: the namespace of the
// release may be one of them.
func TestNothingIsRenderedTwice(t *testing.T) {
	sets := valueSets(t)
	sets["own namespace"] = "{namespaces: [" + namespace + ", team-a]}"
	for name, values := range sets {
		manifest, err := template(t, values)
		if err != nil {
			t.Fatal(err)
		}
		seen := map[string]bool{}
		for _, u := range objects(t, manifest) {
			if seen[key(u)] {
				t.Errorf("%s: %s is rendered twice", name, key(u))
			}
			seen[key(u)] = true
		}
	}
}

// TestNamesAreStrings checks that names are rendered as strings, even if YAML would parse them as another type. CRDs
// contain no name, and take most of the time.
func TestNamesAreStrings(t *testing.T) {
	const everything = `
namespaces: [NAME]
imagePullSecrets: [{name: NAME}]
caBundle: NAME
manager: {replicas: 2, priorityClassName: NAME}
store: {priorityClassName: NAME, persistence: {PERSISTENCE: NAME}}
monitoring: {enabled: true}
dashboards: {enabled: true}
webhooks: {enabled: true, certManager: true}
networkPolicies: {enabled: true}
`
	for _, persistence := range []string{"storageClassName", "existingClaim"} {
		rendered := func(name string) string {
			values := strings.NewReplacer("NAME", strconv.Quote(name), "PERSISTENCE", persistence).Replace(everything)
			text, err := json.Marshal(render(t, values, append(slices.Clone(withoutCRDs), "--namespace", name)...))
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
		const plain = "an-inert-name"
		for _, name := range []string{"1234", "1e3", "on", "null"} {
			if diff := cmp.Diff(strings.ReplaceAll(rendered(plain), plain, name), rendered(name)); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", persistence, name, diff)
			}
		}
	}
}

// TestKustomizeEqualsChart checks that kustomize and Helm install the same objects. Only kustomize has the namespace,
// and only Helm has keep annotations.
func TestKustomizeEqualsChart(t *testing.T) {
	kubectl, err := programs.Kubectl()
	tier.Require(t, err)
	manifest, err := programs.Run(kubectl, nil, "", "kustomize", filepath.Join(repository, "config", "default"))
	if err != nil {
		t.Fatal(err)
	}
	byKey := func(all []*unstructured.Unstructured) map[string]map[string]any {
		m := map[string]map[string]any{}
		for _, u := range all {
			m[key(u)] = u.Object
		}
		return m
	}
	kustomized := byKey(objects(t, manifest))
	if ours := "/v1, Kind=Namespace /" + namespace; kustomized[ours] == nil {
		t.Errorf("config/default has no namespace %s", namespace)
	} else {
		delete(kustomized, ours)
	}
	rendered := byKey(withoutHelmLabels(render(t, "{crds: {keep: false}, store: {persistence: {keep: false}}}")))
	if diff := cmp.Diff(rendered, kustomized); diff != "" {
		t.Errorf("config/default differs from the chart (-chart +kustomize):\n%s", diff)
	}
}

// withoutHelmLabels removes the labels that only Helm sets. Generated objects in config/ have no label.
func withoutHelmLabels(all []*unstructured.Unstructured) []*unstructured.Unstructured {
	for _, u := range all {
		labels := u.GetLabels()
		generated := u.GetKind() == "CustomResourceDefinition" || u.GetKind() == "ClusterRole" && u.GetName() == "semmoe-manager"
		maps.DeleteFunc(labels, func(name, _ string) bool { return generated || slices.Contains(helmLabels, name) })
		if u.SetLabels(labels); len(labels) == 0 {
			unstructured.RemoveNestedField(u.Object, "metadata", "labels")
		}
	}
	return all
}

// helmLabels are the standard labels with the name of the release, and of the chart and its version.
var helmLabels = []string{"app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "app.kubernetes.io/version", "helm.sh/chart"}

// TestLabels checks that every object has the standard labels and commonLabels, that commonLabels are also set on pods,
// and that neither changes a selector, which is immutable.
func TestLabels(t *testing.T) {
	const values = `
commonLabels: {team: inference, app.kubernetes.io/component: other}
monitoring: {enabled: true, certManager: true, labels: {release: prometheus}}
dashboards: {enabled: true, grafanaOperator: {enabled: true}}
webhooks: {certManager: true}
`
	selectors := func(u *unstructured.Unstructured) any {
		s, _, _ := unstructured.NestedFieldCopy(u.Object, "spec", "selector")
		return s
	}
	plain := map[string]any{}
	for _, u := range render(t, "{monitoring: {enabled: true}}", withoutCRDs...) {
		plain[key(u)] = selectors(u)
	}
	for _, u := range render(t, values) {
		labels := u.GetLabels()
		want := map[string]string{"app.kubernetes.io/name": "semmoe", "app.kubernetes.io/version": "dev", "helm.sh/chart": "semmoe-operator-0.1.0", "team": "inference"}
		want["app.kubernetes.io/instance"], want["app.kubernetes.io/managed-by"] = "semmoe", "Helm"
		for name, value := range want {
			if labels[name] != value {
				t.Errorf("%s: label %s is %q, want %q", key(u), name, labels[name], value)
			}
		}
		if pod := podOf(t, u); pod != nil && (pod.Labels["team"] != "inference" || pod.Labels["app.kubernetes.io/component"] == "other") {
			t.Errorf("a pod of %s has the labels %v", key(u), pod.Labels)
		}
		if before, ok := plain[key(u)]; ok {
			if diff := cmp.Diff(before, selectors(u)); diff != "" {
				t.Errorf("labels change the selector of %s:\n%s", key(u), diff)
			}
		}
	}
}

// TestMonitorsAreDetected checks that the objects of the Prometheus operator are created if the cluster has its API,
// unless the values decide.
func TestMonitorsAreDetected(t *testing.T) {
	const api = "monitoring.coreos.com/v1"
	for _, tc := range []struct {
		values string
		has    bool
		want   int
	}{
		{"{}", true, 4}, {"{}", false, 0}, {"{monitoring: {enabled: true}}", false, 4}, {"{monitoring: {enabled: false}}", true, 0},
	} {
		args := slices.Clone(withoutCRDs)
		if tc.has {
			args = append(args, "--api-versions", api)
		}
		found := 0
		for _, u := range render(t, tc.values, args...) {
			if u.GetAPIVersion() == api {
				found++
			}
		}
		if found != tc.want {
			t.Errorf("%s, with the API %v: %d objects, want %d", tc.values, tc.has, found, tc.want)
		}
	}
}

// TestAlertSettings checks that alerts are removed and changed one by one, and that the others stay as they are.
func TestAlertSettings(t *testing.T) {
	all := func(values string) map[string][]map[string]any {
		rules := map[string][]map[string]any{}
		for _, u := range render(t, values, withoutCRDs...) {
			if u.GetKind() != "PrometheusRule" {
				continue
			}
			groups, _, _ := unstructured.NestedSlice(u.Object, "spec", "groups")
			for _, group := range groups {
				for _, r := range group.(map[string]any)["rules"].([]any) {
					rule := r.(map[string]any)
					rules[rule["alert"].(string)] = append(rules[rule["alert"].(string)], rule)
				}
			}
		}
		return rules
	}
	want := all("{monitoring: {enabled: true}}")
	got := all(`{monitoring: {enabled: true, alerts: {SemMoEDriftRising: {enabled: false}, SemMoEStoreFull: {labels: {severity: critical, team: storage}, for: 20m}}}}`)
	if len(want["SemMoEDriftRising"]) == 0 || len(want["SemMoEStoreFull"]) == 0 {
		t.Fatal("the alerts do not exist")
	}
	delete(want, "SemMoEDriftRising")
	for _, rule := range want["SemMoEStoreFull"] {
		rule["labels"], rule["for"] = map[string]any{"severity": "critical", "team": "storage"}, "20m"
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestKustomizeOverlayOfANamespace checks that an overlay with another namespace replaces the namespace everywhere,
// including arguments, DNS names and bindings.
func TestKustomizeOverlayOfANamespace(t *testing.T) {
	kubectl, err := programs.Kubectl()
	tier.Require(t, err)
	overlay := t.TempDir()
	config, err := filepath.Abs(filepath.Join(repository, "config"))
	if err != nil {
		t.Fatal(err)
	}
	resources := ""
	for _, part := range []string{"default", "monitoring"} {
		relative, err := filepath.Rel(overlay, filepath.Join(config, part))
		if err != nil {
			t.Fatal(err)
		}
		resources += "- " + relative + "\n"
	}
	if err := os.WriteFile(filepath.Join(overlay, "kustomization.yaml"), []byte("namespace: other\nresources:\n"+resources), 0o600); err != nil {
		t.Fatal(err)
	}
	manifest, err := programs.Run(kubectl, nil, "", "kustomize", overlay)
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range objects(t, manifest) {
		text, err := yaml.Marshal(u.Object)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, namespace) {
				t.Errorf("%s still refers to the default namespace: %s", key(u), strings.TrimSpace(line))
			}
		}
		if u.GetNamespace() != "" && u.GetNamespace() != "other" {
			t.Errorf("%s is in namespace %s, want the namespace of the overlay", key(u), u.GetNamespace())
		}
	}
}

// TestRunbookURL checks that the alerts and the dashboard link to the runbooks of the release, or to the URL in the
// values.
func TestRunbookURL(t *testing.T) {
	for values, want := range map[string]string{
		"{monitoring: {enabled: true}, dashboards: {enabled: true}}":                                                   "https://github.com/semmoe/operator/blob/main/docs/runbooks/SemMoE",
		"{monitoring: {enabled: true, runbookURL: \"https://wiki.example.com/semmoe/\"}, dashboards: {enabled: true}}": "https://wiki.example.com/semmoe/SemMoE",
	} {
		links := 0
		for _, u := range render(t, values, withoutCRDs...) {
			text, err := yaml.Marshal(u.Object)
			if err != nil {
				t.Fatal(err)
			}
			for _, link := range regexp.MustCompile(`https?://[^"\\\s]*/SemMoE\w+\.md`).FindAllString(string(text), -1) {
				if links++; !strings.HasPrefix(link, want) {
					t.Errorf("%s links to %s, want %s...", key(u), link, want)
				}
			}
		}
		if links < 15 {
			t.Errorf("%s: found %d links to runbooks", values, links)
		}
	}
}

// TestEveryManifestIsInstalled checks that a kustomization includes each file of config. Other files would be neither
// installed nor tested. Exceptions are the samples, the ConfigMap for users of Argo CD, and the files for users of the
// Prometheus operator.
func TestEveryManifestIsInstalled(t *testing.T) {
	config := filepath.Join(repository, "config")
	files, err := filepath.Glob(filepath.Join(config, "*", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, file := range files {
		if filepath.Base(file) != "kustomization.yaml" {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var kustomization struct {
			Resources []string `json:"resources"`
		}
		if err := yaml.Unmarshal(text, &kustomization); err != nil {
			t.Fatal(err)
		}
		for _, resource := range kustomization.Resources {
			named[filepath.Join(filepath.Dir(file), resource)] = true
		}
	}
	named[filepath.Join(config, "monitoring")] = true
	others := []string{filepath.Join(config, "samples"), filepath.Join(config, "argocd")}
	checked := 0
	for _, file := range files {
		directory := filepath.Dir(file)
		if filepath.Base(file) == "kustomization.yaml" || slices.Contains(others, directory) {
			continue
		}
		checked++
		if !named[file] || !named[directory] {
			t.Errorf("%s, or its directory, is in no kustomization", file)
		}
	}
	if checked < 10 {
		t.Errorf("checked only %d manifests in config", checked)
	}
}

// TestEveryFieldOfTheSchemaHasAValue checks that values.yaml has each field of the schema. A missing field would have
// no documentation, and Helm would not report it.
func TestEveryFieldOfTheSchemaHasAValue(t *testing.T) {
	var values, schema map[string]any
	for name, into := range map[string]*map[string]any{"values.yaml": &values, "values.schema.json": &schema} {
		text, err := os.ReadFile(filepath.Join(directory, name))
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal(text, into); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
	}
	properties := schema["properties"].(map[string]any)
	delete(properties, "global")  // defined by Helm
	delete(properties, "enabled") // the condition of a parent chart
	compareFields(t, "", properties, values)
}

// compareFields compares the properties of closed objects with values. Open objects contain fields of users.
func compareFields(t *testing.T, path string, properties, values map[string]any) {
	t.Helper()
	described, given := slices.Sorted(maps.Keys(properties)), slices.Sorted(maps.Keys(values))
	if diff := cmp.Diff(described, given); diff != "" {
		t.Errorf("fields of %q (-values.schema.json +values.yaml):\n%s", path, diff)
		return
	}
	for name, property := range properties {
		if inner, ok := property.(map[string]any)["properties"].(map[string]any); ok {
			compareFields(t, path+"."+name, inner, values[name].(map[string]any))
		}
	}
}

// TestValuesAreValidated checks that invalid values are refused, with a message that names the value and what is
// allowed.
func TestValuesAreValidated(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0", 64)
	cases := map[string]struct {
		values  string
		message []string // parts of the message; none: accepted
	}{
		"a misspelled section":           {`{managr: {}}`, []string{"additional properties 'managr' not allowed"}},
		"a misspelled field":             {`{manager: {replica: 1}}`, []string{"'/manager'", "additional properties 'replica' not allowed"}},
		"a misspelled field, deep":       {`{store: {persistence: {storageClass: fast}}}`, []string{"'/store/persistence'", "'storageClass' not allowed"}},
		"part of another chart":          {`{global: {region: eu}}`, nil},
		"the condition of another chart": {`{enabled: true}`, nil},
		"no condition at all":            {`{enabled: "yes"}`, []string{"'/enabled'", "got string, want boolean"}},
		"disabled, but installed":        {`{enabled: false}`, []string{"enabled: false", "uninstall it"}},
		"a repository of a registry":     {`{image: {repository: "localhost:5000/team/semmoe"}}`, nil},
		"a repository with a tag":        {`{image: {repository: "semmoe:v1"}}`, []string{"'/image/repository'", "'semmoe:v1' does not match pattern"}},
		"no repository": {`{image: {repository: ""}}`, []string{
			"image.repository is required: set it to the repository to which the image of the operator was pushed, for example --set image.repository=registry.example/semmoe"}},
		"a tag that is a number":            {`{image: {tag: 1.10}}`, []string{"'/image/tag'", "got number, want string"}},
		"a tag with a colon":                {`{image: {tag: ":v1"}}`, []string{"'/image/tag'", "does not match pattern"}},
		"a digest":                          {`{image: {digest: "` + digest + `"}}`, nil},
		"a digest without its algorithm":    {`{image: {digest: "` + digest[7:] + `"}}`, []string{"'/image/digest'", "does not match pattern", "sha256:"}},
		"a short digest":                    {`{image: {digest: "sha256:abc"}}`, []string{"'/image/digest'", "[0-9a-f]{64}"}},
		"an unknown pull policy":            {`{image: {pullPolicy: Sometimes}}`, []string{"'/image/pullPolicy'", "'Always', 'IfNotPresent', 'Never'"}},
		"pull secrets as names":             {`{imagePullSecrets: [registry]}`, []string{"'/imagePullSecrets/0'", "got string, want object"}},
		"a pull secret without a name":      {`{imagePullSecrets: [{}]}`, []string{"'/imagePullSecrets/0'", "missing property 'name'"}},
		"authorities of a cluster":          {`{caBundle: cluster-authorities}`, nil},
		"authorities themselves":            {`{caBundle: "-----BEGIN CERTIFICATE-----"}`, []string{"'/caBundle'", "does not match pattern"}},
		"authorities in two places":         {`{caBundle: a, store: {env: [{name: SSL_CERT_DIR, value: /a}]}}`, []string{"store.env: SSL_CERT_DIR", "caBundle"}},
		"namespaces as text":                {`{namespaces: "a,b"}`, []string{"'/namespaces'", "got string, want array"}},
		"an invalid namespace":              {`{namespaces: [Team]}`, []string{"'/namespaces/0'", "'Team' does not match pattern"}},
		"a namespace twice":                 {`{namespaces: [a, a]}`, []string{"'/namespaces'", "items at 0 and 1 are equal"}},
		"a boolean as a string":             {`{crds: {keep: "yes"}}`, []string{"'/crds/keep'", "got string, want boolean"}},
		"network policies as a list":        {`{networkPolicies: []}`, []string{"networkPolicies"}},
		"a monitor's label as a number":     {`{monitoring: {labels: {release: 1}}}`, []string{"'/monitoring/labels/release'", "got number, want string"}},
		"a dashboard's label as a number":   {`{dashboards: {labels: {grafana_dashboard: 1}}}`, []string{"'/dashboards/labels/grafana_dashboard'", "got number, want string"}},
		"a dashboard's folder":              {`{dashboards: {enabled: true, annotations: {grafana_folder: Inference}}}`, nil},
		"monitors, perhaps":                 {`{monitoring: {enabled: yes please}}`, []string{"'/monitoring/enabled'", "true, false, 'auto'"}},
		"an unknown alert":                  {`{monitoring: {enabled: true, alerts: {SemMoEFull: {enabled: false}}}}`, []string{"monitoring.alerts.SemMoEFull is not an alert of this chart", "SemMoEStoreFull"}},
		"an alert's severity as a list":     {`{monitoring: {alerts: {SemMoEStoreFull: {labels: {severity: [a]}}}}}`, []string{"'/monitoring/alerts/SemMoEStoreFull/labels/severity'", "want string"}},
		"an alert's expression":             {`{monitoring: {alerts: {SemMoEStoreFull: {expr: up}}}}`, []string{"'/monitoring/alerts/SemMoEStoreFull'", "'expr' not allowed"}},
		"an alert's duration in words":      {`{monitoring: {alerts: {SemMoEStoreFull: {for: soon}}}}`, []string{"'/monitoring/alerts/SemMoEStoreFull/for'", "does not match pattern"}},
		"an issuer of the platform":         {`{certManager: {issuerRef: {name: platform, kind: ClusterIssuer}}, webhooks: {certManager: true}}`, nil},
		"an issuer without a name":          {`{certManager: {issuerRef: {kind: ClusterIssuer}}}`, []string{"'/certManager/issuerRef'", "missing property 'name'"}},
		"an issuer without a certificate":   {`{certManager: {issuerRef: {name: platform}}}`, []string{"certManager.issuerRef has no effect", "webhooks.certManager or monitoring.certManager"}},
		"a common label as a number":        {`{commonLabels: {cost: 1}}`, []string{"'/commonLabels/cost'", "got number, want string"}},
		"no manager":                        {`{manager: {replicas: 0}}`, []string{"'/manager/replicas'", "minimum: got 0, want 1"}},
		"a fractional number of managers":   {`{manager: {replicas: 1.5}}`, []string{"'/manager/replicas'", "want integer"}},
		"managers as text":                  {`{manager: {replicas: "2"}}`, []string{"'/manager/replicas'", "got string, want integer"}},
		"too many managers":                 {`{manager: {replicas: 11}}`, []string{"'/manager/replicas'", "maximum: got 11, want 10"}},
		"no solver":                         {`{manager: {solverWorkers: 0}}`, []string{"'/manager/solverWorkers'", "minimum: got 0, want 1"}},
		"retention of hours and minutes":    {`{manager: {artifactRetention: 36h30m}}`, nil},
		"retention in days":                 {`{manager: {artifactRetention: 7d}}`, []string{"'/manager/artifactRetention'", "'7d' does not match pattern"}},
		"retention of no time":              {`{manager: {artifactRetention: 0h}}`, []string{"'/manager/artifactRetention'", "'0h' does not match pattern"}},
		"no retention":                      {`{manager: {artifactRetention: ""}}`, []string{"'/manager/artifactRetention'", "minLength"}},
		"memory with a wrong unit":          {`{manager: {resources: {limits: {memory: 2GB}}}}`, []string{"'/manager/resources/limits/memory'", "'2GB' does not match pattern"}},
		"invalid resources":                 {`{store: {resources: {memory: 2Gi}}}`, []string{"'/store/resources'", "'memory' not allowed"}},
		"CPUs as a number":                  {`{manager: {resources: {limits: {cpu: 2}}}}`, nil},
		"an invalid priority class":         {`{manager: {priorityClassName: System_Critical}}`, []string{"'/manager/priorityClassName'", "does not match pattern"}},
		"a node label that is not a string": {`{store: {nodeSelector: {gpu: true}}}`, []string{"'/store/nodeSelector/gpu'", "got boolean, want string"}},
		"a toleration with a typo":          {`{manager: {tolerations: [{keys: a}]}}`, []string{"'/manager/tolerations/0'", "'keys' not allowed"}},
		"a toleration of an unknown kind":   {`{manager: {tolerations: [{operator: Like}]}}`, []string{"'/manager/tolerations/0/operator'", "'Exists', 'Equal'"}},
		"a bucket":                          {`{store: {url: "s3://bucket?region=eu-central-1", replicas: 3}}`, nil},
		"another directory":                 {`{store: {url: "file:///srv"}}`, []string{"'/store/url'", "'file:///srv' does not match pattern", "file:///data", "s3://"}},
		"a web address":                     {`{store: {url: "https://bucket"}}`, []string{"'/store/url'", "does not match pattern"}},
		"two stores on a volume":            {`{store: {replicas: 2}}`, []string{"store.replicas: 2 is invalid with store.url file:///data", "set store.replicas to 1, or store.url to s3://"}},
		"two stores that are disabled": {
			`{store: {enabled: false, replicas: 2}}`, nil},
		"a volume without a size":         {`{store: {persistence: {size: ""}}}`, []string{"'/store/persistence/size'", "does not match pattern"}},
		"a variable without a name":       {`{store: {env: [{value: a}]}}`, []string{"'/store/env/0'", "missing property 'name'"}},
		"a variable that is not a string": {`{store: {env: [{name: A, value: 1}]}}`, []string{"'/store/env/0/value'", "got number, want string"}},
		"an annotation that is a list":    {`{store: {serviceAccountAnnotations: {a: [b]}}}`, []string{"'/store/serviceAccountAnnotations/a'", "want string"}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			_, err := template(t, tc.values, withoutCRDs...)
			if len(tc.message) == 0 {
				if err != nil {
					t.Errorf("valid values are refused: %v", err)
				}
				return
			}
			if err == nil {
				t.Fatal("invalid values are accepted")
			}
			for _, part := range tc.message {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("the message lacks %q: %v", part, err)
				}
			}
		})
	}
}

// TestImage checks that all containers and arguments have the same image reference, and that a digest is not combined
// with the default tag.
func TestImage(t *testing.T) {
	digest := "sha256:" + strings.Repeat("a", 64)
	cases := map[string]struct{ values, want string }{
		"default":          {`{}`, "semmoe:dev"},
		"tag":              {`{image: {tag: v1.2.3}}`, "semmoe:v1.2.3"},
		"digest":           {`{image: {repository: r.example/semmoe, digest: "` + digest + `"}}`, "r.example/semmoe@" + digest},
		"tag and digest":   {`{image: {tag: v1, digest: "` + digest + `"}}`, "semmoe:v1@" + digest},
		"watched, digest":  {`{namespaces: [a], image: {digest: "` + digest + `"}}`, "semmoe@" + digest},
		"watched, default": {`{namespaces: [a, b]}`, "semmoe:dev"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			images := map[string]int{}
			for _, u := range render(t, tc.values, withoutCRDs...) {
				text, err := json.Marshal(u.Object)
				if err != nil {
					t.Fatal(err)
				}
				for _, container := range containers(u) {
					images[container["image"].(string)]++
				}
				if _, argument, ok := strings.Cut(string(text), "--image="); ok && !strings.HasPrefix(argument, tc.want+`"`) {
					t.Errorf("%s has a different image in its arguments: %s", key(u), argument)
				}
			}
			if diff := cmp.Diff(map[string]int{tc.want: 2}, images); diff != "" {
				t.Errorf("images of containers (-want +got):\n%s", diff)
			}
		})
	}
}

// TestPullPolicy checks that the pull policy is set on all containers, and passed to the manager for the pods that it
// creates.
func TestPullPolicy(t *testing.T) {
	for _, policy := range []string{"", "Never"} {
		for _, u := range render(t, `{image: {pullPolicy: "`+policy+`"}}`, withoutCRDs...) {
			for _, container := range containers(u) {
				if given, _ := container["imagePullPolicy"].(string); given != policy {
					t.Errorf("%s has pull policy %q, want %q", key(u), given, policy)
				}
			}
		}
	}
	for values, want := range map[string]bool{`{}`: false, `{image: {pullPolicy: Never}}`: true} {
		if got := slices.Contains(managerArguments(t, render(t, values, withoutCRDs...)), "--image-pull-policy=Never"); got != want {
			t.Errorf("%s: pull policy arguments of managers = %v", values, got)
		}
	}
}

// TestAuthorities checks that containers which connect to servers outside the cluster trust the certificate authorities
// of a ConfigMap, in addition to those of the image. SSL_CERT_FILE would replace the authorities of the image.
func TestAuthorities(t *testing.T) {
	for name, values := range map[string]string{
		"a volume": "{}", "a bucket": "{store: {url: \"s3://bucket\"}}", "cert-manager": "{webhooks: {certManager: true}}", "no store": "{store: {enabled: false}}",
	} {
		for _, u := range render(t, values, append(slices.Clone(withoutCRDs), "--set", "caBundle=cluster-authorities")...) {
			pod := podOf(t, u)
			if pod == nil {
				continue
			}
			container, directory := pod.Spec.Containers[0], ""
			for _, variable := range container.Env {
				if variable.Name == "SSL_CERT_DIR" {
					directory = variable.Value
				}
				if variable.Name == "SSL_CERT_FILE" {
					t.Errorf("%s, %s: the authorities of the image are replaced", name, key(u))
				}
			}
			mount := slices.IndexFunc(container.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == directory && m.ReadOnly })
			if directory == "" || mount < 0 {
				t.Errorf("%s, %s: no volume is mounted at %q: %+v", name, key(u), directory, container.VolumeMounts)
				continue
			}
			volume := slices.IndexFunc(pod.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == container.VolumeMounts[mount].Name })
			if source := pod.Spec.Volumes[volume].ConfigMap; source == nil || source.Name != "cluster-authorities" || len(source.Items) != 1 || source.Items[0].Key != "ca.crt" {
				t.Errorf("%s, %s: wrong volume source %+v", name, key(u), source)
			}
		}
	}
}

// TestPartOfAnotherChart checks that a parent chart enables this chart with the usual condition.
func TestPartOfAnotherChart(t *testing.T) {
	parent := t.TempDir()
	if err := os.WriteFile(filepath.Join(parent, "Chart.yaml"), []byte(`
apiVersion: v2
name: platform
version: 1.0.0
dependencies:
- {name: semmoe-operator, version: ">=0.0.0-0", condition: semmoe-operator.enabled}
`), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(parent, "charts", "semmoe-operator"), os.DirFS(directory)); err != nil {
		t.Fatal(err)
	}
	whole := len(render(t, "{}"))
	for switched, want := range map[string]int{"true": whole, "false": 0} {
		manifest, err := helm(t, nil, "{semmoe-operator: {enabled: "+switched+", image: {repository: semmoe}}}", "template", "platform", parent, "--namespace", namespace)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(objects(t, manifest)); got != want {
			t.Errorf("enabled=%s: %d objects, want %d", switched, got, want)
		}
	}
}

// TestUserRolesCoverEveryKind checks that the roles for users allow to read and write every kind of the operator, including
// new ones.
func TestUserRolesCoverEveryKind(t *testing.T) {
	verbs := map[string]map[string][]string{} // by role and resource
	var kinds []string
	for _, u := range render(t, "{}") {
		switch u.GetKind() {
		case "CustomResourceDefinition":
			plural, _, _ := unstructured.NestedString(u.Object, "spec", "names", "plural")
			kinds = append(kinds, plural)
		case "ClusterRole":
			role := &rbacv1.ClusterRole{}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(u.Object, role, true); err != nil {
				t.Fatalf("%s: %v", key(u), err)
			}
			verbs[role.Name] = map[string][]string{}
			for _, rule := range role.Rules {
				for _, resource := range rule.Resources {
					verbs[role.Name][resource] = append(verbs[role.Name][resource], rule.Verbs...)
				}
			}
		}
	}
	if len(kinds) != 3 {
		t.Errorf("the chart has kinds %v, want 3", kinds)
	}
	for _, kind := range kinds {
		for _, tc := range []struct{ role, resource, verb string }{
			{"semmoe-viewer", kind, "get"}, {"semmoe-viewer", kind, "list"}, {"semmoe-viewer", kind, "watch"}, {"semmoe-viewer", kind + "/status", "get"},
			{"semmoe-editor", kind, "create"}, {"semmoe-editor", kind, "patch"}, {"semmoe-editor", kind, "delete"},
		} {
			if !slices.Contains(verbs[tc.role][tc.resource], tc.verb) {
				t.Errorf("%s cannot %s %s", tc.role, tc.verb, tc.resource)
			}
		}
		if slices.Contains(verbs["semmoe-viewer"][kind], "create") || len(verbs["semmoe-editor"][kind+"/status"]) > 0 {
			t.Errorf("users have more write rights to %s than intended", kind)
		}
	}
}

// containers returns the containers in the pod template of a workload.
func containers(u *unstructured.Unstructured) []map[string]any {
	list, _, _ := unstructured.NestedSlice(u.Object, "spec", "template", "spec", "containers")
	var all []map[string]any
	for _, container := range list {
		all = append(all, container.(map[string]any))
	}
	return all
}
