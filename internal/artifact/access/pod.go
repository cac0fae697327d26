// SPDX-License-Identifier: Apache-2.0

package access

import (
	"fmt"
	"os"
	"time"

	"github.com/semmoe/operator/internal/artifact"
)

// FromPod returns a client for a process in a pod with Env and TokenVolume.
func FromPod(retryFor time.Duration) (*Client, error) {
	url, ca := os.Getenv(artifact.URLVariable), os.Getenv(artifact.CAVariable)
	if url == "" || ca == "" {
		return nil, fmt.Errorf("the environment variables %s and %s of the artifact store are not set", artifact.URLVariable, artifact.CAVariable)
	}
	return NewClient(Config{URL: url, CA: []byte(ca), TokenFile: artifact.TokenFile, RetryFor: retryFor})
}
