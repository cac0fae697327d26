// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/semmoe/operator/test/markdown"
)

// namespaceToSave has an object of each category that the backup distinguishes. Columns: kind, name, "made" if the
// operator created the object, spec, status, and the plan in its label.
const namespaceToSave = `[
	["MoEDeployment", "a", "", {"placement": {"planRef": {"name": "tables"}}}],
	["MoEDeployment", "b", "", {"placement": {}}],
	["ConfigMap", "dataset", ""], ["ConfigMap", "kube-root-ca.crt", ""], ["Secret", "token", ""],
	["ConfigMap", "a-answers", "made"],
	["AffinityProfile", "asked", "made"], ["AffinityProfile", "live", "made"], ["AffinityProfile", "other", "made"], ["AffinityProfile", "own", ""],
	["PlacementPlan", "layout", "made", {"profileRef": {"name": "asked"}}, {"planDigest": "d0", "tier": "Layout"}],
	["PlacementPlan", "tables", "made", {"profileRef": {"name": "live"}, "priorProfileRef": {"name": "asked"}, "current": {"planDigest": "d0"}}, {"planDigest": "d1", "tier": "Tables"}],
	["PlacementPlan", "unpinned", "made", {"profileRef": {"name": "other"}, "current": {"planDigest": "d0"}}, {"planDigest": "d2", "tier": "Tables"}],
	["PlacementPlan", "unsolved", "made", {"profileRef": {"name": "other"}}],
	["PlacementPlan", "own", "", {"profileRef": {"name": "own"}}, {"planDigest": "d3"}],
	["ConfigMap", "layout-d0", "made", null, null, "layout"], ["ConfigMap", "tables-d1", "made", null, null, "tables"],
	["ConfigMap", "unpinned-d2", "made", null, null, "unpinned"], ["ConfigMap", "own-plan", "made", null, null, "own"]
]`

// TestBackupCommand checks that the backup command saves the objects of users, and only those objects of the operator
// that it does not recreate.
func TestBackupCommand(t *testing.T) {
	jq, err := exec.LookPath("jq")
	if err != nil {
		t.Skip("jq is not installed")
	}
	command := exec.CommandContext(t.Context(), jq, backupProgram(t))
	command.Stdin = strings.NewReader(listToSave(t))
	output, err := command.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	var saved struct {
		Items []struct {
			Kind     string
			Status   any
			Metadata map[string]any
		}
	}
	if err := json.Unmarshal(output, &saved); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, item := range saved.Items {
		names = append(names, item.Kind+" "+item.Metadata["name"].(string))
		if item.Status != nil || item.Metadata["uid"] != nil || item.Metadata["ownerReferences"] != nil || item.Metadata["annotations"] == nil {
			t.Errorf("%s is saved with status %v or wrong metadata %v", item.Kind, item.Status, item.Metadata)
		}
	}
	slices.Sort(names)
	want := []string{
		"AffinityProfile asked", "AffinityProfile live", "AffinityProfile own",
		"ConfigMap dataset", "ConfigMap layout-d0", "ConfigMap own-plan", "ConfigMap tables-d1",
		"MoEDeployment a", "MoEDeployment b", "PlacementPlan layout", "PlacementPlan own", "PlacementPlan tables", "Secret token",
	}
	if !slices.Equal(names, want) {
		t.Errorf("saved objects = %q, want %q", names, want)
	}
}

// backupProgram returns the jq program in docs/backup.md.
func backupProgram(t *testing.T) string {
	t.Helper()
	for _, block := range markdown.Blocks(documents(t)["docs/backup.md"]) {
		if _, after, ok := strings.Cut(block.Text, "| jq '"); ok {
			program, _, _ := strings.Cut(after, "'")
			return program
		}
	}
	t.Fatal("docs/backup.md has no command with jq")
	return ""
}

// listToSave returns the output of kubectl for the namespace.
func listToSave(t *testing.T) string {
	t.Helper()
	var rows [][]any
	if err := json.Unmarshal([]byte(namespaceToSave), &rows); err != nil {
		t.Fatal(err)
	}
	var items []any
	for _, row := range rows {
		row = append(row, nil, nil, nil)
		metadata := map[string]any{"name": row[1], "uid": "u", "annotations": map[string]any{"a": "b"}, "ownerReferences": []any{map[string]any{"uid": "o"}}}
		if row[2] == "made" {
			metadata["labels"] = map[string]any{"app.kubernetes.io/managed-by": "semmoe-operator", "semmoe.io/plan": row[5]}
		}
		items = append(items, map[string]any{"kind": row[0], "spec": row[3], "status": row[4], "metadata": metadata})
	}
	text, err := json.Marshal(map[string]any{"kind": "List", "items": items})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
