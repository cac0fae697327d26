// SPDX-License-Identifier: Apache-2.0

package gitops

import "context"

// health is the result of a health check.
type health struct {
	Status  string `json:"status"`
	Message string `json:"message,omitempty"`
}

// statuses are the health statuses of Argo CD. Any other status is an error of the script.
var statuses = []string{"Healthy", "Progressing", "Degraded", "Suspended", "Missing", "Unknown"}

// runScript runs a health check on an object.
func runScript(ctx context.Context, script string, object map[string]any) (health, error) {
	table, err := run(ctx, script, object)
	if err != nil {
		return health{}, err
	}
	return health{table.RawGetString("status").String(), table.RawGetString("message").String()}, nil
}
