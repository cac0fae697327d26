// SPDX-License-Identifier: Apache-2.0

package lookup

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

const (
	// progressTimeout bounds a request for the progress, so that a pod that does not respond does not delay the
	// reconciliation.
	progressTimeout = 2 * time.Second
	// maxProgress bounds the response, in bytes.
	maxProgress = 64 << 10
)

// Progress requests the progress of the Job in a pod, as JSON.
func Progress(ctx context.Context, web *http.Client, podIP string, port int32, path string, into any) error {
	ctx, cancel := context.WithTimeout(ctx, progressTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s%s", net.JoinHostPort(podIP, fmt.Sprint(port)), path), nil)
	if err != nil {
		return err
	}
	response, err := web.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return errors.New(response.Status)
	}
	return json.NewDecoder(io.LimitReader(response.Body, maxProgress)).Decode(into)
}
